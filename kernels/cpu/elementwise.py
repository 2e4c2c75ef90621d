"""The small operations between the products: embedding rows, RMS norm, rotary positions, gated SiLU.

Bound by memory; a step of few rows is bound by the call itself, so small calls stay on the caller's thread.
"""

import math
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils

from graphrt.kernels.cpu import vector_ir as v
from graphrt.kernels.cpu.jit import BODY, F32, I32, REAL, U16, WORD, check, intrinsic, reads, source_stamp, writes
from graphrt.kernels.cpu.memory import load_f32, load_i32, load_i64, store_f32, store_i64
from graphrt.kernels.cpu.team import ARGS, run, shared_team, take

BF16 = np.dtype(ml_dtypes.bfloat16)
SMALL = 16384  # elements; below this a second thread costs more than it brings


@intrinsic
def silu_mul_16(typing_context: Any, gate: Any, up: Any, out: Any) -> Any:
    """silu_mul_16(gate, up, out): 16 floats of out = gate / (1 + exp(-gate)) * up"""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x = v.load(b, args[0], v.VF)
        size = cgutils.get_or_insert_function(b.module, ir.FunctionType(v.VF, [v.VF]), "llvm.fabs.v16f32")
        t = v.exp_nonpositive(b, b.fneg(b.call(size, [x])))
        one = v.const(1.0)
        top = b.select(b.fcmp_ordered("<", x, v.const(0.0)), t, one)
        y = b.fmul(x, b.fdiv(top, b.fadd(one, t)))
        v.store(b, b.fmul(y, v.load(b, args[1], v.VF)), args[2])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


# Only the order of additions is left to the compiler: it is one compiled loop, so one order for all rows.
@njit(fastmath={"reassoc", "contract", "nsz"})
def _sum_squares(x: int, count: int) -> np.float32:
    total = np.float32(0.0)
    for i in range(count):
        value = load_f32(x + 4 * i)
        total += value * value
    return total


@njit
def _rms_norm(control: int, who: int) -> None:
    a = control + ARGS
    x, rows, width = load_i64(a), load_i64(a + 8), load_i64(a + 16)
    weight, out, eps = load_i64(a + 24), load_i64(a + 32), load_f32(a + 40)
    while True:
        first, last = take(control, rows)
        if first == last:
            return
        for row in range(first, last):
            source, target = x + row * width * 4, out + row * width * 4
            mean = _sum_squares(source, width) / np.float32(width)
            factor = np.float32(1.0) / np.float32(math.sqrt(mean + eps))
            for i in range(0, width * 4, 4):
                store_f32(target + i, load_f32(source + i) * factor * load_f32(weight + i))


@njit
def _silu_mul(control: int, who: int) -> None:
    a = control + ARGS
    gate_up, rows, width, out = load_i64(a), load_i64(a + 8), load_i64(a + 16), load_i64(a + 24)
    spare = load_i64(a + 32) + who * load_i64(a + 40)
    whole = width // 16 * 64
    while True:
        first, last = take(control, rows)
        if first == last:
            return
        for row in range(first, last):
            gate = gate_up + row * width * 8
            up, target = gate + width * 4, out + row * width * 4
            for i in range(0, whole, 64):
                silu_mul_16(gate + i, up + i, target + i)
            if whole < width * 4:
                for i in range(0, 64, 4):
                    inside = whole + i < width * 4
                    store_f32(spare + i, load_f32(gate + whole + i) if inside else np.float32(0.0))
                    store_f32(spare + 64 + i, load_f32(up + whole + i) if inside else np.float32(0.0))
                silu_mul_16(spare, spare + 64, spare)
                for i in range(0, width * 4 - whole, 4):
                    store_f32(target + whole + i, load_f32(spare + i))


@njit
def _rope(control: int, who: int) -> None:
    a = control + ARGS
    x, rows, heads, half = load_i64(a), load_i64(a + 8), load_i64(a + 16), load_i64(a + 24) * 4
    positions, cos, sin = load_i64(a + 32), load_i64(a + 40), load_i64(a + 48)
    while True:
        first, last = take(control, rows)
        if first == last:
            return
        for row in range(first, last):
            shift = load_i32(positions + row * 4) * half
            for head in range(heads):
                low = x + (row * heads + head) * 2 * half
                high = low + half
                for i in range(0, half, 4):
                    c, s = load_f32(cos + shift + i), load_f32(sin + shift + i)
                    one, two = load_f32(low + i), load_f32(high + i)
                    store_f32(low + i, one * c - two * s)
                    store_f32(high + i, two * c + one * s)


@cache
def _compiled() -> tuple[Any, ...]:
    stamp = source_stamp()

    @cfunc(BODY, cache=True)
    def norm_body(control: int, who: int) -> None:
        if stamp:
            _rms_norm(control, who)

    @cfunc(BODY, cache=True)
    def silu_body(control: int, who: int) -> None:
        if stamp:
            _silu_mul(control, who)

    @cfunc(BODY, cache=True)
    def rope_body(control: int, who: int) -> None:
        if stamp:
            _rope(control, who)

    @njit(types.void(WORD, WORD, WORD, reads(F32, 2), reads(F32, 1), REAL, writes(F32, 2)), cache=True)
    def norm(control: int, workers: int, body: int, x: Any, weight: Any, eps: float, out: Any) -> None:
        if stamp:
            a = control + ARGS
            store_i64(a, x.ctypes.data)
            store_i64(a + 8, x.shape[0])
            store_i64(a + 16, x.shape[1])
            store_i64(a + 24, weight.ctypes.data)
            store_i64(a + 32, out.ctypes.data)
            store_f32(a + 40, np.float32(eps))
            run(control, body, workers)

    @njit(types.void(WORD, WORD, WORD, WORD, WORD, reads(F32, 2), writes(F32, 2)), cache=True)
    def silu(control: int, workers: int, body: int, scratch: int, gap: int, gate_up: Any, out: Any) -> None:
        if stamp:
            a = control + ARGS
            store_i64(a, gate_up.ctypes.data)
            store_i64(a + 8, out.shape[0])
            store_i64(a + 16, out.shape[1])
            store_i64(a + 24, out.ctypes.data)
            store_i64(a + 32, scratch)
            store_i64(a + 40, gap)
            run(control, body, workers)

    table = reads(F32, 2)

    @njit(types.boolean(WORD, WORD, WORD, writes(F32, 3), reads(I32, 1), table, table), cache=True)
    def rope(control: int, workers: int, body: int, x: Any, positions: Any, cos: Any, sin: Any) -> bool:
        if stamp:
            for row in range(x.shape[0]):
                if positions[row] < 0 or positions[row] >= cos.shape[0]:
                    return False
            a = control + ARGS
            store_i64(a, x.ctypes.data)
            store_i64(a + 8, x.shape[0])
            store_i64(a + 16, x.shape[1])
            store_i64(a + 24, x.shape[2] // 2)
            store_i64(a + 32, positions.ctypes.data)
            store_i64(a + 40, cos.ctypes.data)
            store_i64(a + 48, sin.ctypes.data)
            run(control, body, workers)
        return True

    return norm, norm_body, silu, silu_body, rope, rope_body


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight along the last axis; x and out float32 [R, D], weight float32 [D].

    out may be x itself. A row's result has the same bits in any batch. Raises ValueError when something does not fit.
    """
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(f"x: want [R, D] with D > 0, have {list(x.shape)}")
    check("x", x, F32, x.shape)
    check("out", out, F32, x.shape)
    check("weight", weight, F32, x.shape[1:])
    norm, body, *_ = _compiled()
    team = shared_team()
    with team.lock:
        norm(team.control, team.workers if x.size > SMALL else 0, body.address, x, weight, eps, out)


def silu_mul(gate_up: np.ndarray, out: np.ndarray) -> None:
    """out = silu(gate) * up; gate_up float32 [R, 2F] holds gate in its first F columns, out float32 [R, F].

    Raises ValueError when something does not fit.
    """
    if out.ndim != 2:
        raise ValueError(f"out: want [R, F], have {list(out.shape)}")
    check("out", out, F32, out.shape)
    check("gate_up", gate_up, F32, (out.shape[0], 2 * out.shape[1]))
    _, _, silu, body, *_ = _compiled()
    team = shared_team()
    with team.lock:
        workers = team.workers if out.size > SMALL else 0
        silu(team.control, workers, body.address, team.scratch, team.SCRATCH, gate_up, out)


def rope(x: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate x float32 [R, H, hd] in place by its rows' positions int32 [R]; cos and sin float32 [P, hd / 2].

    Half-rotation layout: element i pairs with element i + hd / 2. Raises ValueError when something does not fit or a position
    lies outside 0..P-1.
    """
    if x.ndim != 3 or x.shape[2] % 2 or cos.ndim != 2:
        raise ValueError(
            f"x: want [R, H, hd] with an even hd and cos [P, hd / 2], have {list(x.shape)}, {list(cos.shape)}"
        )
    check("x", x, F32, x.shape)
    check("positions", positions, I32, x.shape[:1])
    table = (cos.shape[0], x.shape[2] // 2)
    check("cos", cos, F32, table)
    check("sin", sin, F32, table)
    *_, turn, body = _compiled()
    team = shared_team()
    with team.lock:
        good = turn(team.control, team.workers if x.size > SMALL else 0, body.address, x, positions, cos, sin)
    if not good:
        raise ValueError(f"positions: want 0 to {cos.shape[0] - 1}, have {positions.min()} to {positions.max()}")


def embed(tokens: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """out[r] = table[tokens[r]]; tokens int32 [R], table [V, D] float32 or bfloat16 (or its bits as uint16), out float32 [R, D].

    The table may be read-only. Raises ValueError when something does not fit or a token lies outside 0..V-1.
    """
    if table.ndim != 2 or table.dtype not in (F32, U16, BF16):
        raise ValueError(f"table: want float32 or bfloat16 [V, D], have {table.dtype} {list(table.shape)}")
    check("tokens", tokens, I32, (out.shape[0],))
    check("out", out, F32, (out.shape[0], table.shape[1]))
    # As unsigned words negative tokens are too large as well, so one bound serves both.
    if tokens.size and tokens.view(np.uint32).max() >= table.shape[0]:
        raise ValueError(f"tokens: want 0 to {table.shape[0] - 1}, have {tokens.min()} to {tokens.max()}")
    if table.dtype == F32:
        out[...] = table[tokens]
    else:
        np.left_shift(table.view(U16)[tokens], 16, out=out.view(np.uint32), dtype=np.uint32)
