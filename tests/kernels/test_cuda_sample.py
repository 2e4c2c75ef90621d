"""What the sampler's kernel relies on, computed in NumPy's float32: the bounds of its approximations, and that its division is division."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sample_rows import Rows

from graphrt.kernels import abi
from graphrt.kernels.cuda import sample
from graphrt.kernels.cuda.fake_driver import FakeDriver
from graphrt.kernels.cuda.jit import SOURCES

F32 = np.float32
LN2 = F32(0.693147181)
LG2_ERROR = 2.0**-22  # of lg2.approx and ex2.approx, relative, and absolute where the logarithm is near 0


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def fma(a: Any, b: Any, c: Any) -> NDArray[np.float32]:
    """a·b + c, rounded once: the product of two float32 is exact in float64, the sum in long double."""
    return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(F32)


def lg2(x: NDArray[np.float32], error: float) -> NDArray[np.float32]:
    """The worst logarithm that the instruction may give."""
    exact = np.log2(x.astype(np.float64))
    near = (x > 0.5) & (x < 2)
    return np.where(near, exact + error, exact * (1 + error)).astype(F32)


def approx_noise(word: NDArray[np.uint32], error: float) -> NDArray[np.float32]:
    """sample_noise.cuh's, step by step."""
    small = word < 1 << 28
    x = (np.where(small, word, ~word).astype(F32) + F32(0.5)) * F32(2**-32)
    series = x * (F32(1) + x * (F32(0.5) + x * (F32(1 / 3) + x * (F32(0.25) + x * F32(0.2)))))
    u = np.where(small, series, -LN2 * lg2(np.maximum(x, F32(2**-24)), error))
    return -LN2 * lg2(u.astype(F32), error)


@pytest.mark.parametrize("error", [LG2_ERROR, -LG2_ERROR])
def test_approximate_noise_is_within_its_bound(rng: np.random.Generator, error: float) -> None:
    """Over all magnitudes of the word, and the edges of its two formulas."""
    bits = (rng.integers(0, 1 << 32, 400_000) >> rng.integers(0, 32, 400_000)).astype(np.uint32)
    edges = np.array([0, 1, 2, (1 << 28) - 1, 1 << 28, (1 << 32) - 257, (1 << 32) - 256, (1 << 32) - 1], np.uint32)
    word = np.concatenate([bits, ~bits, edges])
    v = np.minimum((word.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-v))
    source = (SOURCES / "sample_noise.cuh").read_text()
    bound = float.fromhex(re.findall(r"NOISE_ERROR = (0x1p-\d+)f;", source)[0])
    worst = np.abs(approx_noise(word, error) - exact).max()
    assert 0 < worst < bound / 2, worst


def test_the_division_is_rounded_as_division(rng: np.random.Generator) -> None:
    x = (rng.standard_normal(1_000_000) * 2.0 ** rng.integers(-20, 12, 1_000_000)).astype(F32)
    t = (rng.uniform(1, 2, 1_000_000) * 2.0 ** rng.integers(-19, 8, 1_000_000)).astype(F32)
    inverse = F32(1) / t
    q = x * inverse
    np.testing.assert_array_equal(fma(fma(-q, t, x), inverse, q), x / t)


def test_weights_are_within_their_bound(rng: np.random.Generator) -> None:
    peak = (rng.standard_normal(100_000) * 20).astype(F32)
    x = peak - (rng.random(100_000) * 32).astype(F32)
    d = x - peak
    y = d * F32(1.44269502)
    rest = fma(d, F32(1.92596303e-8), fma(d, F32(1.44269502), -y))
    p = (np.exp2(y.astype(np.float64)) * (1 + LG2_ERROR)).astype(F32)
    got = fma(p, rest * LN2, p).astype(np.float64)
    assert np.abs(got / np.exp(d.astype(np.float64)) - 1).max() < 2**-21


def test_shapes_that_the_kernel_does_not_take(rng: np.random.Generator) -> None:
    driver = FakeDriver()
    rows = Rows(driver, rng, 2, 100)
    device, _ = rows.pair.view("decode", 2)
    with pytest.raises(ValueError, match=r"logits of shape \(2, 99\)"):
        sample.sample(driver, driver.alloc((2, 99), F32), device)
    wide = Rows(driver, rng, 1, sample.MAX_VOCAB + 1)
    device, _ = wide.pair.view("decode", 1)
    with pytest.raises(ValueError, match="a vocabulary of 262145 tokens"):
        sample.sample(driver, driver.alloc((1, sample.MAX_VOCAB + 1), F32), device)


def test_a_cluster_fits_the_card() -> None:
    driver = FakeDriver(sm_count=132)
    assert [sample.cluster_of(driver, n) for n in (1, 33, 34, 66, 67, 132, 133, 1024)] == [8, 8, 4, 4, 2, 2, 1, 1]


def test_limits_are_those_of_the_source() -> None:
    text = (SOURCES / "sample_row.cuh").read_text()
    assert f"MAX_VOCAB = {sample.MAX_VOCAB};" in text
    assert sample.workspace_shape() == (1,) and abi.MAX_LOGPROBS <= 32
