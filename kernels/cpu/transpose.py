"""Turning rows into columns in registers: 16 rows of 8 values become 8 rows of 16. Moves bits, computes nothing."""

from typing import Any

from llvmlite import ir
from numba import types

from graphrt.kernels.cpu import vector_ir as v
from graphrt.kernels.cpu.jit import intrinsic

I16 = ir.IntType(16)
WORDS8 = ir.VectorType(v.I32, 8)
HALVES8 = ir.VectorType(I16, 8)


def _turn(b: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of 8 lanes -> eight of 16: lane t of result d is lane d of row t."""
    z = [v.shuffle(b, rows[t], rows[t + 8], list(range(16))) for t in range(8)]
    for s in (4, 2, 1):  # swap the off-diagonal s x s squares, in both halves of each vector alike
        for i in range(8):
            if not i & s:
                top = [lane if not lane & s else 16 + lane - s for lane in range(16)]
                bottom = [lane + s if not lane & s else 16 + lane for lane in range(16)]
                z[i], z[i + s] = v.shuffle(b, z[i], z[i + s], top), v.shuffle(b, z[i], z[i + s], bottom)
    return z


def _loop_over_eights(b: Any, eights: Any, source: Any, target: Any, step: int, target_step: Any, block: Any) -> None:
    """Call block(source, target) `eights` times, moving source on by `step` bytes and target by `target_step`."""
    before = b.block
    loop = b.append_basic_block("eight")
    done = b.append_basic_block("turned")
    b.cbranch(b.icmp_signed(">", eights, v.I64(0)), loop, done)
    b.position_at_end(loop)
    left, here, there = b.phi(v.I64), b.phi(v.I64), b.phi(v.I64)
    block(here, there)
    following = (b.sub(left, v.I64(1)), v.offset(b, here, step), b.add(there, target_step))
    for phi, first, after in zip((left, here, there), (eights, source, target), following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(after, loop)
    b.cbranch(b.icmp_signed(">", following[0], v.I64(0)), loop, done)
    b.position_at_end(done)


@intrinsic
def turn_f32(typing_context: Any, source: Any, source_stride: Any, target: Any, target_stride: Any, eights: Any) -> Any:
    """turn_f32(source, source_stride, target, target_stride, eights): target[d, t] = source[t, d], 16 t, 8 * eights d.

    float32 (or any 4-byte values); addresses and strides in bytes.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, source_stride, target, target_stride, eights = args

        def block(here: Any, there: Any) -> None:
            rows = [v.load(b, b.add(here, b.mul(source_stride, v.I64(t))), WORDS8) for t in range(16)]
            for d, column in enumerate(_turn(b, rows)):
                v.store(b, column, b.add(there, b.mul(target_stride, v.I64(d))))

        _loop_over_eights(b, eights, source, target, 32, b.mul(target_stride, v.I64(8)), block)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def turn_bf16_pairs(typing_context: Any, source: Any, source_stride: Any, target: Any, eights: Any) -> Any:
    """turn_bf16_pairs(source, source_stride, target, eights): 32 rows of 8 * eights bf16 -> lines of 16 words.

    Word c of line k holds row c in its low and row c + 16 in its high half; a line is 64 bytes.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, source_stride, target, eights = args

        def block(here: Any, there: Any) -> None:
            row = [v.load(b, b.add(here, b.mul(source_stride, v.I64(c))), HALVES8, 2) for c in range(32)]
            row = [b.zext(halves, WORDS8) for halves in row]
            pairs = [b.or_(row[c], b.shl(row[c + 16], v.iconst(16, 8))) for c in range(16)]
            for d, column in enumerate(_turn(b, pairs)):
                v.store(b, column, v.offset(b, there, 64 * d))

        _loop_over_eights(b, eights, source, target, 16, v.I64(512), block)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
