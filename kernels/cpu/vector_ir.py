"""Vector instructions in LLVM IR: what the intrinsics of this package are written with.

Everything is spelled out (which fma, which order), since numba's own vectoriser neither contracts to fma nor promises an
order. Vectors are 16 floats wide; LLVM splits them where the machine's registers are narrower, with the same results.
"""

import struct
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, config

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VF = ir.VectorType(F32, 16)
VI = ir.VectorType(I32, 16)


def wide_host() -> bool:
    """Whether code is compiled for 32 registers of 512 bits; otherwise it must make do with 16 narrower ones."""
    chosen = getattr(config, "CPU_FEATURES", None)  # NUMBA_CPU_FEATURES
    if chosen is not None:
        return "+avx512f" in chosen
    return bool(llvm.get_host_cpu_features().get("avx512f", False))


def pointer(b: Any, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def offset(b: Any, address: Any, nbytes: int) -> Any:
    return b.add(address, I64(nbytes)) if nbytes else address


def load(b: Any, address: Any, kind: Any, align: int = 4) -> Any:
    value = b.load(pointer(b, address, kind))
    value.align = align
    return value


def store(b: Any, value: Any, address: Any, align: int = 4) -> None:
    b.store(value, pointer(b, address, value.type)).align = align


def splat(b: Any, scalar: Any, lanes: int = 16) -> Any:
    kind = ir.VectorType(scalar.type, lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def const(value: float, lanes: int = 16) -> Any:
    return ir.Constant(ir.VectorType(F32, lanes), [value] * lanes)


def iconst(value: int, lanes: int = 16) -> Any:
    return ir.Constant(ir.VectorType(I32, lanes), [value] * lanes)


def shuffle(b: Any, one: Any, two: Any, picks: list[int]) -> Any:
    return b.shuffle_vector(one, two, ir.Constant(ir.VectorType(I32, len(picks)), picks))


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    kind = x.type
    name = f"llvm.fma.v{kind.count}f32"
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name), [x, y, z])


def prefetch(b: Any, address: Any) -> None:
    """Ask for a cache line in the second level (the first has too few open requests); no address does harm."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [b.inttoptr(address, byte), I32(0), I32(2), I32(1)])


def fold(b: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All 16 lanes combined by halving: lane i with lane i + 8, then + 4, + 2, + 1. One order, always."""
    for half in (8, 4, 2, 1):
        low = shuffle(b, vector, vector, list(range(half)))
        high = shuffle(b, vector, vector, list(range(half, 2 * half)))
        vector = combine(low, high)
    return b.extract_element(vector, I32(0))


def larger(b: Any, one: Any, two: Any) -> Any:
    """The larger of each lane; a NaN in `one` gives `two`."""
    return b.select(b.fcmp_ordered(">", one, two), one, two)


def exp_nonpositive(b: Any, x: Any) -> Any:
    """exp of 16 lanes for x <= 0, to about 1 ulp; 0 below -86.5, NaN stays NaN.

    x = n ln 2 + r, |r| <= ln 2 / 2, exp(r) by its series to r^7. Adding 1.5 * 2^23 rounds to an integer and leaves that
    integer in the low mantissa bits, so no float-to-int conversion is needed.
    """
    magic = const(12582912.0)
    tiny = b.fcmp_ordered("<", x, const(-86.5))
    x = b.select(tiny, const(-86.5), x)
    shifted = fma(b, x, const(1.4426950216293335), magic)
    n = b.fsub(shifted, magic)
    r = fma(b, n, const(-0.693145751953125), x)
    r = fma(b, n, const(-1.428606765330187e-06), r)
    factorials = (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0)
    y = const(_f32(1.0 / factorials[0]))
    for factorial in factorials[1:]:
        y = fma(b, y, r, const(_f32(1.0 / factorial)))
    power = b.shl(b.bitcast(shifted, VI), iconst(23))
    y = b.bitcast(b.add(b.bitcast(y, VI), power), VF)
    return b.select(tiny, const(0.0), y)


def _f32(value: float) -> float:
    """The nearest float32: LLVM accepts no other value as a float constant."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
