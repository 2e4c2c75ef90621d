"""Memory by address for numba code: plain loads and stores, atomics, a pause for spin loops, a call through a pointer.

Kernel bodies run on several threads and get their arguments as addresses in a control block, so they need these few
operations that numba has no spelling for. Addresses and words are int64; all atomics are sequentially consistent.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from graphrt.kernels.cpu.jit import intrinsic

I64 = ir.IntType(64)
SEQ = "seq_cst"


@intrinsic
def load_i64(typing_context: Any, address: Any) -> Any:
    """load_i64(address) -> int64"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], I64.as_pointer()))

    return types.int64(types.int64), codegen


@intrinsic
def store_i64(typing_context: Any, address: Any, value: Any) -> Any:
    """store_i64(address, value)"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_i32(typing_context: Any, address: Any) -> Any:
    """load_i32(address) -> int64, sign extended"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], ir.IntType(32).as_pointer())), I64)

    return types.int64(types.int64), codegen


@intrinsic
def store_i32(typing_context: Any, address: Any, value: Any) -> Any:
    """store_i32(address, value): the low 32 bits of value"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.trunc(args[1], ir.IntType(32))
        builder.store(word, builder.inttoptr(args[0], ir.IntType(32).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_u16(typing_context: Any, address: Any) -> Any:
    """load_u16(address) -> int64, zero extended"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(args[0], ir.IntType(16).as_pointer())), I64)

    return types.int64(types.int64), codegen


@intrinsic
def store_u16(typing_context: Any, address: Any, value: Any) -> Any:
    """store_u16(address, value): the low 16 bits of value"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.trunc(args[1], ir.IntType(16))
        builder.store(word, builder.inttoptr(args[0], ir.IntType(16).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_f32(typing_context: Any, address: Any) -> Any:
    """load_f32(address) -> float32"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()))

    return types.float32(types.int64), codegen


@intrinsic
def store_f32(typing_context: Any, address: Any, value: Any) -> Any:
    """store_f32(address, value)"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.FloatType().as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def atomic_load(typing_context: Any, address: Any) -> Any:
    """atomic_load(address) -> int64"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), SEQ, 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typing_context: Any, address: Any, value: Any) -> Any:
    """atomic_store(address, value)"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), SEQ, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """atomic_add(address, value) -> the word before"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], SEQ)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_swap(typing_context: Any, address: Any, value: Any) -> Any:
    """atomic_swap(address, value) -> the word before"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], I64.as_pointer()), args[1], SEQ)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_replace(typing_context: Any, address: Any, old: Any, new: Any) -> Any:
    """atomic_replace(address, old, new) -> whether the word was `old` and is now `new`"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(builder.inttoptr(args[0], I64.as_pointer()), args[1], args[2], SEQ, SEQ)
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def relax(typing_context: Any) -> Any:
    """relax(): tell the core that this is a spin loop"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        nothing = ir.FunctionType(ir.VoidType(), [])
        if builder.module.triple.startswith("x86_64"):
            builder.call(cgutils.get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        elif builder.module.triple.startswith(("aarch64", "arm64")):
            builder.call(ir.InlineAsm(nothing, "yield", "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_body(typing_context: Any, function: Any, control: Any, who: Any) -> Any:
    """call_body(function, control, who): call a kernel body (jit.BODY) by its address"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1], args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
