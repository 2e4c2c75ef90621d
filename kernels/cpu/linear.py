"""y = x @ W.T over packed weights: the product that a model spends nearly all its time in.

Bound by the memory's read bandwidth for few rows and by fma throughput for many; see fma_tile.py for the loop. W is packed
once into tiles of 32 outputs, k major, so that a thread reads one long stream. A tile stays in the cache for all rows of a
chunk. Every output is one fma chain in k order from +0.0, so results have the same bits for any number of rows, any chunking
and any number of threads.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numba import cfunc, njit

from graphrt.kernels.cpu.fma_tile import TILE, tile_bf16, tile_f32, tile_rows
from graphrt.kernels.cpu.jit import BODY, F32, U16, WORD, check, reads, source_stamp, writes
from graphrt.kernels.cpu.memory import load_f32, load_i64, load_u16, store_f32, store_i64, store_u16
from graphrt.kernels.cpu.team import ARGS, run, shared_team, take
from graphrt.kernels.cpu.transpose import turn_bf16_pairs, turn_f32

BF16 = np.dtype(ml_dtypes.bfloat16)
CHUNK_ROWS = 96  # rows of a work item: enough that reading the tile again does not show, few enough for many cores
NO_BIAS = np.empty(0, np.float32)


@dataclass(frozen=True)
class PackedLinear:
    """A weight matrix [n, k], packed: data is [ceil(n / 32), k, 32], float32, or uint16 holding bf16 bits.

    Missing outputs of the last tile are zero. In bf16 tiles, column c of 0..15 lies at 2c and column c + 16 at 2c + 1.
    """

    data: np.ndarray
    n: int
    k: int


@njit
def _finish(sums: int, rows: int, out: int, stride: int, columns: int, bias: int, add: int) -> None:
    """Write finished sums [rows, 32] to the output, after bias and, if `add`, what the output held."""
    for r in range(rows):
        source = sums + r * TILE * 4
        target = out + r * stride
        if bias != 0:
            for c in range(columns):
                store_f32(source + 4 * c, load_f32(source + 4 * c) + load_f32(bias + 4 * c))
        if add != 0:
            for c in range(columns):
                store_f32(target + 4 * c, load_f32(target + 4 * c) + load_f32(source + 4 * c))
        else:
            for c in range(columns):
                store_f32(target + 4 * c, load_f32(source + 4 * c))


@njit
def _linear(control: int, who: int, half: bool) -> None:
    a = control + ARGS
    x, rows, k = load_i64(a), load_i64(a + 8), load_i64(a + 16)
    w, n, out = load_i64(a + 24), load_i64(a + 32), load_i64(a + 40)
    bias, add, sums = load_i64(a + 48), load_i64(a + 56), load_i64(a + 64) + who * load_i64(a + 72)
    chunks = (rows + CHUNK_ROWS - 1) // CHUNK_ROWS
    items = (n + TILE - 1) // TILE * chunks
    most = tile_rows()
    line = TILE * 2 if half else TILE * 4
    while True:
        first, last = take(control, items)
        if first == last:
            return
        for item in range(first, last):
            column = item // chunks * TILE
            tile = w + item // chunks * k * line
            row = item % chunks * CHUNK_ROWS
            end = min(rows, row + CHUNK_ROWS)
            while row < end:
                count = min(most, end - row)
                if half:
                    tile_bf16(x + row * k * 4, k * 4, tile, line, sums, TILE * 4, k, count)
                else:
                    tile_f32(x + row * k * 4, k * 4, tile, line, sums, TILE * 4, k, count)
                shift = bias + 4 * column if bias != 0 else 0
                _finish(sums, count, out + (row * n + column) * 4, n * 4, min(TILE, n - column), shift, add)
                row += count


@njit
def _pack(control: int, who: int, half: bool) -> None:
    a = control + ARGS
    source, n, k, data = load_i64(a), load_i64(a + 8), load_i64(a + 16), load_i64(a + 24)
    items = (n + TILE - 1) // TILE
    while True:
        first, last = take(control, items)
        if first == last:
            return
        for item in range(first, last):
            columns = min(TILE, n - item * TILE)
            rows = source + item * TILE * k * (2 if half else 4)
            tile = data + item * TILE * k * (2 if half else 4)
            eights = k // 8 if columns == TILE else 0
            if half:
                turn_bf16_pairs(rows, k * 2, tile, eights)
            else:
                turn_f32(rows, k * 4, tile, TILE * 4, eights)
                turn_f32(rows + 16 * k * 4, k * 4, tile + 64, TILE * 4, eights)
            for i in range(8 * eights, k):
                for c in range(columns):
                    if half:
                        store_u16(tile + (i * TILE + 2 * (c & 15) + (c >> 4)) * 2, load_u16(rows + (c * k + i) * 2))
                    else:
                        store_f32(tile + (i * TILE + c) * 4, load_f32(rows + (c * k + i) * 4))


@cache
def _compiled() -> tuple[Any, Any, Any, Any, Any]:
    stamp = source_stamp()

    @cfunc(BODY, cache=True)
    def linear_bf16(control: int, who: int) -> None:
        if stamp:
            _linear(control, who, True)

    @cfunc(BODY, cache=True)
    def linear_f32(control: int, who: int) -> None:
        if stamp:
            _linear(control, who, False)

    @cfunc(BODY, cache=True)
    def pack_bf16(control: int, who: int) -> None:
        if stamp:
            _pack(control, who, True)

    @cfunc(BODY, cache=True)
    def pack_f32(control: int, who: int) -> None:
        if stamp:
            _pack(control, who, False)

    before, after = (WORD, WORD, WORD, reads(F32, 2)), (WORD, reads(F32, 1), writes(F32, 2), WORD, WORD, WORD)

    @njit([WORD(*before, reads(kind, 3), *after) for kind in (U16, F32)], nogil=True, cache=True)
    def enter(
        control: int,
        workers: int,
        body: int,
        x: Any,
        data: Any,
        n: int,
        bias: Any,
        out: Any,
        add: int,
        sums: int,
        gap: int,
    ) -> int:
        if stamp:
            a = control + ARGS
            store_i64(a, x.ctypes.data)
            store_i64(a + 8, x.shape[0])
            store_i64(a + 16, x.shape[1])
            store_i64(a + 24, data.ctypes.data)
            store_i64(a + 32, n)
            store_i64(a + 40, out.ctypes.data)
            store_i64(a + 48, bias.ctypes.data if bias.size else 0)
            store_i64(a + 56, add)
            store_i64(a + 64, sums)
            store_i64(a + 72, gap)
            run(control, body, workers)
        return 0

    return enter, linear_bf16, linear_f32, pack_bf16, pack_f32


def pack_linear(w: np.ndarray) -> PackedLinear:
    """Pack w [N, K], float32 or bfloat16 (ml_dtypes' type, or its bits as uint16). Copies; may be read-only.

    Raises ValueError on another dtype, another number of axes, or an empty matrix.
    """
    if w.ndim != 2 or 0 in w.shape or w.dtype not in (F32, U16, BF16):
        raise ValueError(f"weight: want float32 or bfloat16 [N, K], not empty, have {w.dtype} {list(w.shape)}")
    w = np.ascontiguousarray(w)
    n, k = w.shape
    half = w.dtype != F32
    data = shared_team().weights.take((-(-n // TILE), k, TILE), U16 if half else F32)
    if n % TILE:
        data[-1] = 0
    body = _compiled()[3 if half else 4]
    shared_team().run(body.address, w.ctypes.data, n, k, data.ctypes.data)
    return PackedLinear(data, n, k)


def linear(x: np.ndarray, w: PackedLinear, bias: np.ndarray | None, out: np.ndarray, accumulate: bool = False) -> None:
    """out = x @ W.T + bias, or out += that: x float32 [R, K], bias float32 [N] or None, out float32 [R, N].

    `accumulate` adds the finished sum (bias included) to out, which must not overlap x. R may be 0.
    Raises ValueError when a shape, dtype or layout does not fit.
    """
    rows = x.shape[0]
    check("x", x, F32, (rows, w.k))
    check("out", out, F32, (rows, w.n))
    if bias is None:
        bias = NO_BIAS
    else:
        check("bias", bias, F32, (w.n,))
    enter, bf16, f32, _, _ = _compiled()
    body = bf16 if w.data.dtype == U16 else f32
    team = shared_team()
    with team.lock:
        workers = team.workers if rows else 0
        enter(
            team.control, workers, body.address, x, w.data, w.n, bias, out, int(accumulate), team.scratch, team.SCRATCH
        )
