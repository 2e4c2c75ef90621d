import numpy as np
import pytest

from graphrt.kernels.cpu.sampling import argmax_rows, gumbel_noise, philox
from graphrt.kernels.cpu.team import set_threads, shared_team

rng = np.random.default_rng()


@pytest.mark.parametrize(
    "counter,key,want",
    [  # the known answers published with Random123
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, want):
    assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == want


def formula(seed, position, token):
    block = philox([token >> 2, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
    v = min((float(block[token & 3]) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return np.float32(-np.log(-np.log1p(-v)))


def test_noise_is_the_formula():
    seed, position = int(rng.integers(2**63)) * 2 + 1, int(rng.integers(2**32))
    noise = gumbel_noise(seed, position, 4099)
    for token in [0, 1, 2, 3, 4, 1023, 1024, 4095, 4098, *rng.integers(0, 4099, 200)]:
        want = formula(seed, position, int(token))
        assert abs(noise[token] - want) <= np.spacing(abs(want))


def test_noise_depends_on_each_argument_and_on_nothing_else():
    base = gumbel_noise(5, 9, 3001)
    assert np.array_equal(gumbel_noise(5, 9, 10), base[:10])
    for other in (gumbel_noise(6, 9, 3001), gumbel_noise(5, 10, 3001), gumbel_noise(5 + (1 << 32), 9, 3001)):
        assert (other != base).mean() > 0.99
    out = np.full(3001, np.nan, np.float32)
    before = shared_team().threads
    for threads in (1, 3):
        set_threads(threads)
        assert gumbel_noise(5, 9, 3001, out) is out and np.array_equal(out, base)
    set_threads(before)


def test_noise_has_gumbels_distribution():
    noise = np.sort(gumbel_noise(int(rng.integers(2**62)), 3, 40000).astype(np.float64))
    expected = np.exp(-np.exp(-noise))  # its distribution function
    gap = np.abs(expected - (np.arange(40000) + 0.5) / 40000).max()
    assert gap < 2.2 / np.sqrt(40000)  # Kolmogorov-Smirnov, about 1 in 8000 by chance
    assert np.isfinite(noise).all()


def test_noise_rounds_as_the_formula_does():
    seed = int(rng.integers(2**62))
    noise = gumbel_noise(seed, 8, 20000)
    words = np.array([philox([i, 8, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]) for i in range(5000)]).reshape(-1)
    v = np.minimum((words + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    want = (-np.log(-np.log1p(-v))).astype(np.float32)
    assert (noise != want).sum() <= 2  # float64 logarithms may differ in the last bit, float32 hardly ever


def test_argmax():
    x = rng.standard_normal((5, 1001), dtype=np.float32)
    x[1, [3, 900]] = 50  # a tie
    x[2, 4] = np.nan
    x[2, 0] = np.nan
    x[3] = np.nan
    x[4] = -np.inf
    out = np.full(5, -9, np.int32)
    argmax_rows(x, out)
    assert out.tolist() == [int(x[0].argmax()), 3, int(np.nanargmax(x[2])), 0, 0]
    argmax_rows(np.array([[-np.inf, -2.0, np.inf]], np.float32), out[:1])
    assert out[0] == 2


def test_refusals_name_what_is_wrong():
    with pytest.raises(ValueError, match="out"):
        gumbel_noise(1, 2, 8, np.empty(7, np.float32))
    with pytest.raises(ValueError, match="x"):
        argmax_rows(np.empty((2, 0), np.float32), np.empty(2, np.int32))
    with pytest.raises(ValueError, match="out"):
        argmax_rows(np.empty((2, 3), np.float32), np.empty(2, np.int64))
