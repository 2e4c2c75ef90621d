"""Choosing the next token, in NumPy: the definition that every backend's sampler is tested against.

The noise of a token is a function of (seed, absolute position, token id) alone: Philox4x32-10 (Salmon et al., SC 2011), turned into Gumbel
noise. The sample is argmax(logits / T + noise) over the tokens that the filters keep, which draws from their softmax. So the same request
gives the same tokens in any batch, after preemption, and whatever was drafted.

Filters work on logits / T: top_k, then min_p and top_p on what is left. They are thresholds: tokens that tie with the last kept one stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphrt.kernels.abi import MAX_LOGPROBS

F32 = NDArray[np.float32]
Noise = Callable[[int, int, NDArray[Any], int], F32]

PHILOX_M = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
MIN_TEMPERATURE = 1e-6  # below it sampling is greedy: the winner is certain, and logits / T would overflow
LOW32 = np.uint64(0xFFFFFFFF)
SHIFT32 = np.uint64(32)


def philox4x32(counter: tuple[NDArray[Any], ...], key: tuple[int, int]) -> tuple[NDArray[np.uint64], ...]:
    """Ten rounds of Philox4x32. Four counter words, each an array (or scalar array) of values below 2^32; the output likewise."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * PHILOX_M[0], c2 * PHILOX_M[1]
        c0, c1, c2, c3 = (
            (p1 >> SHIFT32) ^ c1 ^ np.uint64(k0),
            p1 & LOW32,
            (p0 >> SHIFT32) ^ c3 ^ np.uint64(k1),
            p0 & LOW32,
        )
        k0, k1 = (k0 + PHILOX_W[0]) & 0xFFFFFFFF, (k1 + PHILOX_W[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel_noise(seed: int, position: int, token_ids: NDArray[Any]) -> F32:
    """Noise of the given tokens [n] at an absolute position: -log(-log1p(-v)), v = min((word + 1/2)·2^-32, 1 - 2^-24), in float64.

    word = output word (id & 3) of Philox with counter (id >> 2, position, 0, 0) and key (low, high half of the seed). Written with log1p
    because the largest noise, which decides the argmax, comes from small v: there v keeps its full resolution.
    """
    ids = np.asarray(token_ids, np.uint64)
    quads, inverse = np.unique(ids >> np.uint64(2), return_inverse=True)
    zero = np.zeros_like(quads)
    words = philox4x32((quads, np.full_like(quads, position), zero, zero), (seed & 0xFFFFFFFF, seed >> 32))
    word = np.stack(words)[(ids & np.uint64(3)).astype(np.intp), inverse]
    v = np.minimum((word.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return (-np.log(-np.log1p(-v))).astype(np.float32)


def keep_threshold(z: F32, top_k: int, top_p: float, min_p: float) -> np.float32:
    """The least of the scaled logits z [V] that the filters keep. top_k 0, top_p 1 and min_p 0 keep all."""
    threshold = np.float32(-np.inf)
    if 0 < top_k < z.size:
        threshold = np.partition(z, z.size - top_k)[z.size - top_k]
    peak = z.max()
    if min_p > 0:
        threshold = max(threshold, np.float32(peak + np.log(min_p)))
    if top_p < 1:
        left = np.sort(z[z >= threshold])[::-1]
        weight = np.exp((left - peak).astype(np.float64))
        reached = np.cumsum(weight)
        last = int(np.searchsorted(reached, top_p * reached[-1]))
        threshold = left[min(last, left.size - 1)]
    # The likeliest token is always kept, also when min_p rounds to more than 1.
    return min(threshold, peak)


def sample_row(
    logits: F32,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
    noise: Noise | None = None,
) -> int:
    """The token sampled from logits [V] for an absolute position. A temperature below `MIN_TEMPERATURE` is greedy; the lowest id wins a tie.

    `noise`: (seed, position, token ids, V) -> noise of these tokens; None for `gumbel_noise`.
    """
    if temperature < MIN_TEMPERATURE:
        return int(np.argmax(logits))
    z = logits / np.float32(temperature)
    candidates = np.flatnonzero(z >= keep_threshold(z, top_k, top_p, min_p))
    drawn = noise(seed, position, candidates, z.size) if noise else gumbel_noise(seed, position, candidates)
    noisy = z[candidates] + drawn
    return int(candidates[np.argmax(noisy)])


def adjust_logits(
    logits: F32,
    *,
    bias_ids: NDArray[np.int32],
    bias: F32,
    banned: Sequence[int] | NDArray[np.int32],
    repetition: float,
    presence: float,
    frequency: float,
    seen: NDArray[np.uint32],
    counts: NDArray[np.int32],
) -> F32:
    """Logits [V] after bias, bans and penalties, in this order; the input itself when there is nothing to do.

    repetition divides positive and multiplies negative logits of every token in prompt or output (arXiv 1909.05858, with the sign
    handled as in vLLM); presence and frequency are OpenAI's, of the output alone. seen: a bit per token of the prompt.
    counts [V]: occurrences in the output.
    """
    penalties = presence != 0 or frequency != 0
    if not (len(bias_ids) or len(banned) or penalties or repetition != 1):
        return logits
    out = logits.copy()
    np.add.at(out, bias_ids, bias)
    out[np.asarray(banned, np.intp)] = -np.inf
    if repetition != 1:
        bits = np.unpackbits(seen.view(np.uint8), bitorder="little")[: out.size].astype(bool)
        at = np.flatnonzero(bits | (counts > 0))
        r = np.float32(repetition)
        out[at] = np.where(out[at] > 0, out[at] / r, out[at] * r)
    if penalties:
        at = np.flatnonzero(counts)
        out[at] -= np.float32(frequency) * counts[at].astype(np.float32) + np.float32(presence)
    return out


def score_token(logits: F32, token: int, out: NDArray[np.uint32]) -> None:
    """Write a token's log-probability and rank and the likeliest tokens to one entry of `abi.LOGPROB_WORDS` words.

    Log-probabilities are of softmax(logits), computed in float64; of equal logits the lower id comes first, in the list and in ranks.
    """
    z = logits.astype(np.float64)
    peak = z.max()
    normaliser = peak + np.log(np.exp(z - peak).sum())
    count = min(MAX_LOGPROBS, z.size)
    threshold = np.partition(z, z.size - count)[z.size - count]
    candidates = np.flatnonzero(z >= threshold)
    best = candidates[np.argsort(-z[candidates], kind="stable")][:count]
    out[0] = np.float32(z[token] - normaliser).view(np.uint32)
    out[1] = 1 + (z > z[token]).sum() + (z[:token] == z[token]).sum()
    out[2 : 2 + count] = best
    out[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + count] = (z[best] - normaliser).astype(np.float32).view(np.uint32)
