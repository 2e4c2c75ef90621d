"""The sampler beside its definition: odd vocabularies, every combination of options, ties, infinities, padding, log-probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from sample_rows import Rows

from graphrt.kernels import abi
from graphrt.kernels.cuda.driver import Driver

VOCABS = [1, 3, 33, 1000, 1003, 49152]
LARGE = [128256, 151936, 262144]
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 500, "top_p": 0.95},
    {"top_k": 20, "min_p": 0.1, "top_p": 0.5},
    {"top_p": 0.9999},
    {"top_p": 1e-6},
    {"min_p": 1.0},
]


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(params=[1, 2, 4, 8])
def cluster(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy(driver: Driver, rng: np.random.Generator, vocab: int, cluster: int) -> None:
    rows = Rows(driver, rng, 5, vocab)
    rows.logits[1] = np.round(rows.logits[1])  # many ties
    rows.logits[2] = -np.inf
    rows.logits[3] = rng.choice([0.0, -0.0], vocab)
    tokens = rows.check(cluster)
    assert tokens.tolist() == np.argmax(rows.logits, axis=1).tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_sampled_with_every_filter(driver: Driver, rng: np.random.Generator, vocab: int, cluster: int) -> None:
    rows = Rows(driver, rng, 2 * len(FILTERS), vocab)
    for row, (temperature, filters) in enumerate(itertools.product((0.7, 1.3), FILTERS)):
        rows.set(row, temperature=temperature, **filters)
    rows.check(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", LARGE)
def test_large_vocabularies(driver: Driver, rng: np.random.Generator, vocab: int, cluster: int) -> None:
    rows = Rows(driver, rng, 4, vocab)
    rows.set(1, temperature=1.0, num_logprobs=20)
    rows.set(2, temperature=0.8, top_p=0.95)
    rows.set(3, temperature=1.1, top_k=50, top_p=0.9, min_p=0.01)
    rows.check(cluster)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e4])
@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1.0, 50.0])
def test_flat_and_steep_rows(driver: Driver, rng: np.random.Generator, scale: float, temperature: float) -> None:
    """Where thousands of noisy values lie together, and where all of a filter's elements fall into one bin."""
    rows = Rows(driver, rng, len(FILTERS), 3001)
    rows.logits = (rng.standard_normal(rows.logits.shape) * scale - 5 * scale).astype(np.float32)
    for row, filters in enumerate(FILTERS):
        rows.set(row, temperature=temperature, **filters)
    rows.check(4)


def test_ties_at_the_cut_stay(driver: Driver, rng: np.random.Generator, cluster: int) -> None:
    rows = Rows(driver, rng, 12, 1000)
    rows.logits = np.round(rows.logits).astype(np.float32)
    for row in range(12):
        rows.set(row, temperature=2.0, top_k=int(rng.integers(1, 999)), top_p=float(rng.choice([1, 0.8])))
    rows.check(cluster)


def test_infinite_logits_are_never_sampled(driver: Driver, rng: np.random.Generator, cluster: int) -> None:
    rows = Rows(driver, rng, len(FILTERS) + 1, 1003)
    rows.logits[:] = -np.inf
    rows.logits[:-1, [3, 17, 1002]] = 0.5
    for row, filters in enumerate([*FILTERS, {}]):
        rows.set(row, temperature=1.0, **filters)
    tokens = rows.check(cluster)
    assert set(tokens[:-1]) <= {3, 17, 1002} and tokens[-1] == 0


@pytest.mark.parametrize("vocab", [40, 1003, 4096])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_bias_bans_and_penalties(
    driver: Driver, rng: np.random.Generator, vocab: int, temperature: float, cluster: int
) -> None:
    """Every combination; biased ids repeat, and some are banned or penalised too."""
    options = list(itertools.product((0, 1, abi.MAX_BIAS), (0, 5), (1.0, 1.3, 0.8), (0.0, 0.6), (0.0, 0.4)))
    rows = Rows(driver, rng, len(options), vocab)
    for row, (bias, bans, repetition, presence, frequency) in enumerate(options):
        slot = rows.slot_of[row]
        if bias:
            rows.bias_row(row, rng.integers(0, vocab, bias), rng.normal(size=bias) * 4)
        greatest = np.argsort(-rows.logits[row])[: abi.MAX_STOP_IDS]
        rows.set(row, num_stop_ids=bans, stop_ids=greatest, min_len=rows.positions[row] + int(rng.integers(1, 3)))
        rows.counts[slot] = rng.integers(0, 4, vocab) * (rng.random(vocab) < 0.3)
        rows.seen[slot] = rng.integers(0, 1 << 32, rows.seen.shape[1])
        rows.set(row, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
        rows.set(row, temperature=temperature, top_k=int(rng.choice([0, 10])), seed_lo=row)
    rows.check(cluster)


@pytest.mark.parametrize("vocab", [5, 20, 33, 1003, 49152])
def test_logprobs(driver: Driver, rng: np.random.Generator, vocab: int, cluster: int) -> None:
    """Of sampled tokens and of targets, with ties at the twentieth place, of raw logits whatever is biased."""
    rows = Rows(driver, rng, 8, vocab)
    rows.logits[1] = np.round(rows.logits[1])
    rows.logits[2] = 0
    rows.logits[3, rng.permutation(vocab)[: vocab - 3]] = -np.inf
    rows.logits[4] = np.round(rows.logits[4] * 1000)
    for row in range(7):
        rows.set(row, temperature=float(row % 2), num_logprobs=int(rng.integers(0, 21)))
    rows.bias_row(5, np.array([vocab - 1]), np.array([50.0]))
    rows.targets[[4, 6, 7]] = rng.integers(0, vocab, 3)
    rows.check(cluster)


@pytest.mark.parametrize("commit", [False, True])
def test_padding_rows_are_untouched(driver: Driver, rng: np.random.Generator, commit: bool, cluster: int) -> None:
    rows = Rows(driver, rng, 6, 200)
    rows.logits[[0, 2, 5]] = np.nan
    for row in range(6):
        rows.set(row, num_logprobs=3)
    rows.sampled[[0, 2]] = abi.PAD
    rows.slot_of[5] = abi.PAD
    tokens = rows.check(cluster, commit)
    assert (tokens[[0, 2, 5]] < 0).all() and (tokens[[1, 3, 4]] >= 0).all()
    rows.sampled[:] = abi.PAD
    assert (rows.check(cluster, commit) < 0).all()


def test_samples_of_other_rows(driver: Driver, rng: np.random.Generator, cluster: int) -> None:
    """As in a prefill step, sample i is of row sample_rows[i]."""
    rows = Rows(driver, rng, 4, 500)
    for row in range(4):
        rows.set(row, temperature=1.0)
    rows.sampled = np.array([3, 1, abi.PAD, 0], np.int32)
    rows.check(cluster, commit=True)


@pytest.mark.parametrize("count", [1, 7, 40])
def test_commit_in_the_same_launch(driver: Driver, rng: np.random.Generator, count: int) -> None:
    rows = Rows(driver, rng, count, 300)
    for row in range(count):
        rows.set(row, temperature=float(row % 2), num_logprobs=row % 3 - 1, max_len=rows.positions[row] + row % 4)
        rows.set(row, num_stop_ids=3, stop_ids=np.argsort(-rows.logits[row])[:8])
    rows.check(commit=True, repeats=3)


def test_200_repeats_are_identical(driver: Driver, rng: np.random.Generator) -> None:
    repeats = 3 if driver.name == "fake" else 200
    rows = Rows(driver, rng, 9, 20011)
    for row in range(9):
        rows.set(row, temperature=float(row % 3), num_logprobs=row % 4 - 1, **FILTERS[row])
    rows.logits[4] = np.round(rows.logits[4])
    rows.check(commit=True, repeats=repeats)
