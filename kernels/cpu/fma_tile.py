"""The inner loop of every product: a few rows of x times a tile of w, sums held in registers over the whole k loop.

    out[r, c] = fma(x[r, k-1], w[k-1, c], ... fma(x[r, 0], w[0, c], start)), start = +0.0 or the old out[r, c]

Bound by memory for few rows (each weight is read once), by fma throughput for many. The trick: k is never split and lanes are
never summed across, so every output is one chain in k order whatever the number of rows beside it. Rows only decide how many
chains run at once: 12 rows x 32 columns are 24 of 32 registers; with 16 registers, 6 rows and half the columns at a time.

bf16 weights come in words of two, column c in the low and column c + 16 in the high half: a shift and a mask widen 32 of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from graphrt.kernels.cpu import vector_ir as v
from graphrt.kernels.cpu.jit import intrinsic

TILE = 32  # columns of a tile
WIDE_ROWS = 12
NARROW_ROWS = 6
REST_ROWS = 4  # of the functions for what is left of a row after its whole tiles: rarely used, so compiled for less

# How far ahead of its use a weight is asked for, in bytes. Hardware stops its own prefetching at each 4 KiB page, which costs
# a third of the bandwidth.
AHEAD = 8192

Weights = Callable[[Any, Any], list[Any]]


@intrinsic
def tile_rows(typing_context: Any) -> Any:
    """tile_rows() -> the most rows that one call of a tile function takes on this machine, 12 or 6"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return v.I64(_most_rows())

    return types.int64(), codegen


@intrinsic
def ask(typing_context: Any, address: Any) -> Any:
    """ask(address): have a cache line fetched"""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v.prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _most_rows() -> int:
    return WIDE_ROWS if v.wide_host() else NARROW_ROWS


def _bf16_pairs(b: Any, address: Any) -> list[Any]:
    words = v.load(b, address, v.VI)
    low = b.shl(words, v.iconst(16))
    high = b.and_(words, v.iconst(0xFFFF0000))
    return [b.bitcast(low, v.VF), b.bitcast(high, v.VF)]


def _floats(count: int, lanes: int) -> Weights:
    kind = ir.VectorType(v.F32, lanes)
    return lambda b, address: [v.load(b, v.offset(b, address, 4 * lanes * i), kind) for i in range(count)]


def _emit_loop(
    b: Any,
    rows: int,
    keep: Sequence[int],
    lanes: int,
    weights: Weights,
    ahead: Sequence[int],
    continued: bool,
    args: Any,
) -> None:
    """One k loop over `rows` rows and those vectors of the tile that `keep` names."""
    x, x_stride, w, w_stride, out, out_stride, k = args
    kind = ir.VectorType(v.F32, lanes)
    before = b.block
    loop = b.append_basic_block("k")
    done = b.append_basic_block("stored")
    row = [b.add(x, b.mul(x_stride, v.I64(r))) for r in range(rows)]
    place = [[v.offset(b, b.add(out, b.mul(out_stride, v.I64(r))), 4 * lanes * c) for c in keep] for r in range(rows)]
    start = [[v.load(b, p, kind) if continued else v.const(0.0, lanes) for p in line] for line in place]
    b.cbranch(b.icmp_signed(">", k, v.I64(0)), loop, done)

    b.position_at_end(loop)
    index = b.phi(v.I64)
    sums = [[b.phi(kind) for _ in keep] for _ in range(rows)]
    here = b.add(w, b.mul(index, w_stride))
    for distance in ahead:
        v.prefetch(b, v.offset(b, here, distance))
    tile = weights(b, here)
    following = []
    for r in range(rows):
        value = v.splat(b, v.load(b, b.add(row[r], b.mul(index, v.I64(4))), v.F32), lanes)
        following.append([v.fma(b, value, tile[c], sums[r][i]) for i, c in enumerate(keep)])
    step = b.add(index, v.I64(1))
    index.add_incoming(v.I64(0), before)
    index.add_incoming(step, loop)
    b.cbranch(b.icmp_signed("<", step, k), loop, done)

    b.position_at_end(done)
    for r in range(rows):
        for i in range(len(keep)):
            sums[r][i].add_incoming(start[r][i], before)
            sums[r][i].add_incoming(following[r][i], loop)
            final = b.phi(kind)
            final.add_incoming(start[r][i], before)
            final.add_incoming(following[r][i], loop)
            following[r][i] = final
    for r in range(rows):
        for i in range(len(keep)):
            v.store(b, following[r][i], place[r][i])


def _tile_function(
    name: str, vectors: int, lanes: int, weights: Weights, line_bytes: int, continued: bool, most: int = WIDE_ROWS
) -> Any:
    """name(x, x_stride, w, w_stride, out, out_stride, k, rows), rows in 1..min(most, tile_rows()); addresses and strides in bytes.

    `line_bytes` is what one k takes of a packed tile, to be prefetched, or 0.
    """

    def function(
        typing_context: Any, x: Any, x_stride: Any, w: Any, w_stride: Any, out: Any, out_stride: Any, k: Any, rows: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            end = builder.append_basic_block("end")
            choice = builder.switch(args[7], end)
            for count in range(1, min(most, _most_rows()) + 1):
                case = builder.append_basic_block(f"rows{count}")
                choice.add_case(v.I64(count), case)
                builder.position_at_end(case)
                lines = [AHEAD + i for i in range(0, line_bytes, 64)]
                together = v.wide_host() or count <= 2
                for keep in [list(range(vectors))] if together else [[c] for c in range(vectors)]:
                    _emit_loop(builder, count, keep, lanes, weights, lines, continued, args[:7])
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    function.__name__ = function.__qualname__ = name
    return intrinsic(function)


tile_bf16 = _tile_function("tile_bf16", 2, 16, _bf16_pairs, 64, False)
tile_f32 = _tile_function("tile_f32", 2, 16, _floats(2, 16), 128, False)

# For attention: w is no packed tile but rows of a matrix, `w_stride` apart, and sums go on where they stopped.
columns32 = _tile_function("columns32", 2, 16, _floats(2, 16), 0, False)
columns32_more = _tile_function("columns32_more", 2, 16, _floats(2, 16), 0, True)
columns16_more = _tile_function("columns16_more", 1, 16, _floats(1, 16), 0, True, REST_ROWS)
columns8_more = _tile_function("columns8_more", 1, 8, _floats(1, 8), 0, True, REST_ROWS)
