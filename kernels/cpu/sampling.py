"""Random noise for sampling, and the largest logit.

noise(seed, position, token): philox4x32-10 with the counter words (token >> 2, position, 0, 0) and the key words (low 32 bits of
seed, high 32 bits); word = output[token & 3]; then in float64

    v = min((word + 0.5) * 2^-32, 1 - 2^-24)
    noise = -log(-log1p(-v))

rounded to float32. It is Gumbel noise: argmax(logits / T + noise) is a sample of softmax(logits / T). A noise value depends on
nothing but its three arguments, so one token's draw is the same in any batch, chunk or draft.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from graphrt.kernels.cpu.gumbel_ir import gumbel_32, philox_words
from graphrt.kernels.cpu.jit import BODY, F32, I32, I64, WORD, check, reads, source_stamp, writes
from graphrt.kernels.cpu.memory import load_f32, load_i64, store_f32, store_i64
from graphrt.kernels.cpu.team import ARGS, run, shared_team, take

SPAN = 1024  # tokens of a work item
MASK = 0xFFFFFFFF


@njit
def _gumbel(control: int, who: int) -> None:
    a = control + ARGS
    out, vocab, position = load_i64(a), load_i64(a + 8), load_i64(a + 16)
    low, high, spare = load_i64(a + 24), load_i64(a + 32), load_i64(a + 40) + who * load_i64(a + 48)
    while True:
        first, last = take(control, (vocab + SPAN - 1) // SPAN)
        if first == last:
            return
        for token in range(first * SPAN, min(vocab, last * SPAN), 32):
            if token + 32 <= vocab:
                gumbel_32(out + token * 4, token >> 2, position, low, high)
            else:
                gumbel_32(spare, token >> 2, position, low, high)
                for i in range(0, (vocab - token) * 4, 4):
                    store_f32(out + token * 4 + i, load_f32(spare + i))


@cache
def _compiled() -> tuple[Any, ...]:
    stamp = source_stamp()

    @cfunc(BODY, cache=True)
    def body(control: int, who: int) -> None:
        if stamp:
            _gumbel(control, who)

    @njit(types.void(*[WORD] * 5, writes(F32, 1), WORD, WORD, WORD), nogil=True, cache=True)
    def gumbel(
        control: int, workers: int, function: int, scratch: int, gap: int, out: Any, position: int, low: int, high: int
    ) -> None:
        if stamp:
            a = control + ARGS
            store_i64(a, out.ctypes.data)
            store_i64(a + 8, out.size)
            store_i64(a + 16, position)
            store_i64(a + 24, low)
            store_i64(a + 32, high)
            store_i64(a + 40, scratch)
            store_i64(a + 48, gap)
            run(control, function, workers)

    @njit(types.void(reads(F32, 2), writes(I32, 1)), cache=True)
    def argmax(x: Any, out: Any) -> None:
        if stamp:
            for row in range(x.shape[0]):
                best, at = np.float32(-np.inf), 0
                for i in range(x.shape[1]):
                    if x[row, i] > best:
                        best, at = x[row, i], i
                out[row] = at

    @njit(types.void(reads(I64, 1), reads(I64, 1), writes(I64, 1)), cache=True)
    def block(counter: Any, key: Any, out: Any) -> None:
        if stamp:
            philox_words(counter.ctypes.data, key.ctypes.data, out.ctypes.data)

    return gumbel, body, argmax, block


def philox(counter: list[int], key: list[int]) -> list[int]:
    """philox4x32-10 of four counter words and two key words: four random words, each in 0..2^32-1."""
    out = np.empty(4, np.int64)
    _compiled()[3](np.array(counter, np.int64), np.array(key, np.int64), out)
    return [int(word) for word in out]


def gumbel_noise(seed: int, position: int, vocab: int, out: np.ndarray | None = None) -> np.ndarray:
    """float32 [vocab] of noise(seed, position, token) for token = 0..vocab-1 (the module says which), in `out` if given.

    seed is taken modulo 2^64 and position modulo 2^32. Raises ValueError when `out` is not float32 [vocab].
    """
    if out is None:
        out = np.empty(vocab, F32)
    else:
        check("out", out, F32, (vocab,))
    seed = int(seed)
    gumbel, body, *_ = _compiled()
    team = shared_team()
    with team.lock:
        workers = team.workers if vocab > SPAN else 0
        low, high = seed & MASK, (seed >> 32) & MASK
        gumbel(team.control, workers, body.address, team.scratch, team.SCRATCH, out, int(position) & MASK, low, high)
    return out


def argmax_rows(x: np.ndarray, out: np.ndarray) -> None:
    """out[r] = index of the largest x[r]; x float32 [R, V], out int32 [R].

    The lowest index wins a tie; NaN never wins; a row of nothing but NaN and -inf gives 0. Raises ValueError when something does
    not fit.
    """
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(f"x: want [R, V] with V > 0, have {list(x.shape)}")
    check("x", x, F32, x.shape)
    check("out", out, I32, x.shape[:1])
    _compiled()[2](x, out)
