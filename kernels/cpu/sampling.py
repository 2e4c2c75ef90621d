"""Random noise for sampling, and the largest logit.

noise(seed, position, token): philox4x32-10 with the counter words (token >> 2, position, 0, 0) and the key words (low 32 bits of
seed, high 32 bits); word = output[token & 3]; then in float64

    v = min((word + 0.5) * 2^-32, 1 - 2^-24)
    noise = -log(-log1p(-v))

rounded to float32. It is Gumbel noise: argmax(logits / T + noise) is a sample of softmax(logits / T). A noise value depends on
nothing but its three arguments, so one token's draw is the same in any batch, chunk or draft.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from graphrt.kernels.cpu.jit import BODY, F32, I32, WORD, check, reads, source_stamp, writes
from graphrt.kernels.cpu.memory import load_i64, store_f32, store_i64
from graphrt.kernels.cpu.team import ARGS, run, shared_team, take

SPAN = 1024  # tokens of a work item
MASK = 0xFFFFFFFF
Word = np.uint64


@njit
def philox(c0: Word, c1: Word, c2: Word, c3: Word, k0: Word, k1: Word) -> tuple[Word, Word, Word, Word]:
    """philox4x32-10: four counter words and two key words to four random words, all uint64 below 2^32."""
    low = np.uint64(MASK)
    half = np.uint64(32)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c0
        b = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@njit
def _noise(word: Word) -> np.float32:
    v = min((np.float64(word) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return np.float32(-math.log(-math.log1p(-v)))


@njit
def _gumbel(control: int, who: int) -> None:
    a = control + ARGS
    out, vocab, position = load_i64(a), load_i64(a + 8), np.uint64(load_i64(a + 16))
    k0, k1 = np.uint64(load_i64(a + 24)), np.uint64(load_i64(a + 32))
    zero = np.uint64(0)
    while True:
        first, last = take(control, (vocab + SPAN - 1) // SPAN)
        if first == last:
            return
        for token in range(first * SPAN, min(vocab, last * SPAN), 4):
            words = philox(np.uint64(token >> 2), position, zero, zero, k0, k1)
            for i in range(min(4, vocab - token)):
                store_f32(out + (token + i) * 4, _noise(words[i]))


@cache
def _compiled() -> tuple[Any, ...]:
    stamp = source_stamp()

    @cfunc(BODY, cache=True)
    def body(control: int, who: int) -> None:
        if stamp:
            _gumbel(control, who)

    @njit(types.void(WORD, WORD, WORD, writes(F32, 1), WORD, WORD, WORD), nogil=True, cache=True)
    def gumbel(control: int, workers: int, function: int, out: Any, position: int, low: int, high: int) -> None:
        if stamp:
            a = control + ARGS
            store_i64(a, out.ctypes.data)
            store_i64(a + 8, out.size)
            store_i64(a + 16, position)
            store_i64(a + 24, low)
            store_i64(a + 32, high)
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

    return gumbel, body, argmax


def gumbel_noise(seed: int, position: int, vocab: int, out: np.ndarray | None = None) -> np.ndarray:
    """float32 [vocab] of noise(seed, position, token) for token = 0..vocab-1 (the module says which), in `out` if given.

    seed is taken modulo 2^64 and position modulo 2^32. Raises ValueError when `out` is not float32 [vocab].
    """
    if out is None:
        out = np.empty(vocab, F32)
    else:
        check("out", out, F32, (vocab,))
    seed = int(seed)
    gumbel, body, _ = _compiled()
    team = shared_team()
    with team.lock:
        workers = team.workers if vocab > SPAN else 0
        gumbel(team.control, workers, body.address, out, int(position) & MASK, seed & MASK, (seed >> 32) & MASK)
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
