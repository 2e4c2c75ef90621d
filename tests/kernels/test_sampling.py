"""The sampler's definition: known answers, distributions, filters against a plain computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from graphrt.kernels import abi
from graphrt.kernels.sampling import gumbel_noise, keep_threshold, philox4x32, sample_row, score_token

# Known answers of Philox4x32-10, published with Random123.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (np.array([c]) for c in counter)
    assert tuple(int(w[0]) for w in philox4x32((c0, c1, c2, c3), key)) == want


def test_noise_of_a_token_does_not_depend_on_its_company() -> None:
    rng = np.random.default_rng()
    seed, position = int(rng.integers(1 << 63)), int(rng.integers(1 << 20))
    everything = gumbel_noise(seed, position, np.arange(1000))
    some = rng.permutation(1000)[:37]
    np.testing.assert_array_equal(gumbel_noise(seed, position, some), everything[some])
    for other in (gumbel_noise(seed + 1, position, some), gumbel_noise(seed, position + 1, some)):
        assert (other != everything[some]).mean() > 0.9


def test_noise_is_gumbel() -> None:
    noise = np.concatenate([gumbel_noise(7, p, np.arange(40_000)) for p in range(25)]).astype(np.float64)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.005)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.01)
    # The tail decides the argmax: P(noise > x) is about exp(-x).
    for x in (5.0, 8.0, 10.0):
        expect = -math.expm1(-math.exp(-x)) * noise.size
        assert abs((noise > x).sum() - expect) < 5 * math.sqrt(expect)


def chosen(logits: NDArray[np.float32], n: int, **options: float) -> NDArray[np.int64]:
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    picks = [sample_row(logits, seed=11, position=p, **base) for p in range(n)]  # type: ignore[arg-type]
    return np.bincount(picks, minlength=logits.size)


def chi_square(counts: NDArray[np.int64], probability: NDArray[np.float64]) -> float:
    expect = probability * counts.sum()
    assert (counts[expect == 0] == 0).all(), "a filtered token was sampled"
    keep = expect > 0
    return float((((counts - expect) ** 2)[keep] / expect[keep]).sum() / (keep.sum() - 1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_samples_follow_the_softmax(temperature: float) -> None:
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5, -3.0], np.float32)
    p = np.exp(logits.astype(np.float64) / temperature)
    # 99.9th percentile of chi-square with 5 degrees of freedom is 20.5, so 4.1 a degree; the seed is fixed.
    assert chi_square(chosen(logits, 20_000, temperature=temperature), p / p.sum()) < 4.1


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.6}])
def test_filters_renormalise(options: dict[str, float]) -> None:
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5, -3.0], np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: int(options.get("top_k", 6))]
    if "min_p" in options:
        kept = kept[p[kept] >= options["min_p"] * p.max()]
    if "top_p" in options:
        cumulative = np.cumsum(p[kept] / p[kept].sum())
        kept = kept[: int(np.argmax(cumulative >= options["top_p"])) + 1]
    assert 1 <= len(kept) < 6
    q = np.zeros(6)
    q[kept] = p[kept] / p[kept].sum()
    counts = chosen(logits, 10_000, **options)
    if len(kept) == 1:
        assert counts[kept[0]] == 10_000
    else:
        assert chi_square(counts, q) < 7


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = np.array([0, 3, 1, 3, 3], np.float32)
    assert sample_row(logits, temperature=0, top_k=1, top_p=0.1, min_p=1, seed=3, position=5) == 1


def test_ties_with_the_last_kept_token_stay() -> None:
    z = np.array([2, 1, 1, 1, 0], np.float32)
    assert (z >= keep_threshold(z, 2, 1.0, 0.0)).sum() == 4
    assert (z >= keep_threshold(z, 0, 0.6, 0.0)).sum() == 4


@pytest.mark.parametrize(("top_p", "min_p"), [(1e-9, 0.0), (1.0, 1.0), (1e-9, 1.0)])
def test_the_likeliest_token_is_always_kept(top_p: float, min_p: float) -> None:
    z = np.random.default_rng().normal(size=1000).astype(np.float32)
    kept = np.flatnonzero(z >= keep_threshold(z, 0, top_p, min_p))
    assert kept.tolist() == [int(np.argmax(z))]


def test_infinite_logits_are_never_sampled() -> None:
    logits = np.full(64, -np.inf, np.float32)
    logits[[3, 17]] = 0.0
    for options in ({}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.01}):
        assert set(np.flatnonzero(chosen(logits, 50, **options))) == {3, 17}


def test_equal_logits_rank_by_their_id() -> None:
    logits = np.zeros(40, np.float32)
    logits[[30, 31]] = 1.0
    for token, rank in ((30, 1), (31, 2), (0, 3), (5, 8), (39, 40)):
        entry = np.zeros(abi.LOGPROB_WORDS, np.uint32)
        score_token(logits, token, entry)
        assert entry[1] == rank
        assert entry[2 : 2 + abi.MAX_LOGPROBS].tolist() == [30, 31, *range(18)]
        value = entry[:1].view(np.float32)[0]
        assert value == pytest.approx(logits[token] - np.log(38 + 2 * np.e), abs=1e-6)
