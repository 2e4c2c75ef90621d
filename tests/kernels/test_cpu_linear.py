import ml_dtypes
import numpy as np
import pytest

from graphrt.kernels.cpu.linear import PackedLinear, linear, pack_linear
from graphrt.kernels.cpu.team import set_threads, shared_team

DTYPES = [np.float32, ml_dtypes.bfloat16]
ROWS = [1, 2, 3, 5, 12, 13, 64, 300]
rng = np.random.default_rng()


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = shared_team().threads
    set_threads(request.param)
    yield request.param
    set_threads(before)


def weights(n, k, dtype):
    return rng.standard_normal((n, k), dtype=np.float32).astype(dtype)


def poisoned(rows, n):
    return np.full((rows, n), np.nan, np.float32)


def chain(x, w):
    """One output as the contract has it: fma in k order from +0.0. float64 holds a product exactly; the sum may then round
    twice, so this checks the order closely, not to the last bit."""
    total = np.float32(0.0)
    for a, b in zip(x, w.astype(np.float32), strict=True):
        total = np.float32(np.float64(a) * np.float64(b) + np.float64(total))
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,k", [(1, 1), (31, 7), (32, 8), (33, 9), (70, 37), (960, 576), (65, 1536)])
def test_matches_float64(n, k, dtype):
    w = weights(n, k, dtype)
    packed = pack_linear(w)
    assert packed.data.shape == (-(-n // 32), k, 32)
    for rows in (1, 4, 7, 25):
        x = rng.standard_normal((rows, k), dtype=np.float32)
        out = poisoned(rows, n)
        linear(x, packed, None, out)
        want = x.astype(np.float64) @ w.astype(np.float64).T
        scale = np.abs(x).astype(np.float64) @ np.abs(w.astype(np.float64)).T
        assert (np.abs(out - want) <= 2e-6 * scale + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_rows_or_threads(dtype, threads):
    n, k = 129, 203
    w, bias = weights(n, k, dtype), rng.standard_normal(n, dtype=np.float32)
    packed = pack_linear(w)
    x = rng.standard_normal((max(ROWS), k), dtype=np.float32)
    residual = rng.standard_normal((max(ROWS), n), dtype=np.float32)
    single = residual.copy()
    for r in range(len(x)):
        linear(x[r : r + 1], packed, bias, single[r : r + 1], accumulate=True)
    for rows in ROWS:
        out = residual[:rows].copy()
        linear(x[:rows], packed, bias, out, accumulate=True)
        assert out.tobytes() == single[:rows].tobytes(), rows
    plain = poisoned(2, n)
    linear(x[:2], packed, None, plain)
    near = np.array([[chain(x[r], w[c]) for c in range(n)] for r in range(2)], np.float32)
    assert (np.abs(plain - near) <= 2 * np.spacing(np.abs(near))).mean() > 0.95  # another order of addition fails this
    # bias first, then what was there
    assert np.array_equal(residual[:2] + (plain + bias), single[:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_moves_every_weight_once(dtype, threads):
    n, k = 77, 43
    w = weights(n, k, dtype)
    packed = pack_linear(w)
    out = poisoned(k, n)
    linear(np.eye(k, dtype=np.float32), packed, None, out)
    assert np.array_equal(out, w.astype(np.float32).T)
    assert not packed.data[-1].reshape(k, 32)[:, [31, 30]].any()


def test_packing_takes_read_only_strided_and_raw_bf16():
    w = weights(40, 24, ml_dtypes.bfloat16)
    same = pack_linear(w)
    raw = w.view(np.uint16)
    raw.flags.writeable = False
    assert np.array_equal(pack_linear(raw).data, same.data)
    wide = np.zeros((40, 48), ml_dtypes.bfloat16)
    wide[:, ::2] = w
    assert np.array_equal(pack_linear(wide[:, ::2]).data, same.data)


def test_rows_that_are_no_cache_lines_and_guarded_stores():
    k, n = 19, 45
    buffer = rng.standard_normal(4 * k + 3, dtype=np.float32)
    x = buffer[3:].reshape(4, k)
    w = weights(n, k, np.float32)
    room = np.full(4 * n + 64, 7.0, np.float32)
    out = room[32 : 32 + 4 * n].reshape(4, n)
    linear(x, pack_linear(w), None, out)
    assert np.allclose(out, x @ w.T, atol=1e-5)
    assert (room[:32] == 7).all() and (room[32 + 4 * n :] == 7).all()


def test_a_row_with_nan_leaves_the_others_alone():
    w = pack_linear(weights(50, 16, ml_dtypes.bfloat16))
    x = rng.standard_normal((13, 16), dtype=np.float32)
    clean, dirty = poisoned(13, 50), poisoned(13, 50)
    linear(x, w, None, clean)
    x[5] = np.nan
    linear(x, w, None, dirty)
    assert np.isnan(dirty[5]).all()
    others = np.arange(13) != 5
    assert dirty[others].tobytes() == clean[others].tobytes()


def test_no_rows():
    linear(np.empty((0, 8), np.float32), pack_linear(weights(4, 8, np.float32)), None, np.empty((0, 4), np.float32))


def test_read_only_inputs():
    w = pack_linear(weights(33, 8, np.float32))
    x, bias, out = rng.standard_normal((3, 8), dtype=np.float32), np.ones(33, np.float32), poisoned(3, 33)
    linear(x, w, bias, out)
    x.flags.writeable = bias.flags.writeable = False
    again = poisoned(3, 33)
    linear(x, w, bias, again)
    assert out.tobytes() == again.tobytes()


def test_refusals_name_what_is_wrong():
    w = pack_linear(weights(4, 8, np.float32))
    x, out = np.ones((2, 8), np.float32), np.ones((2, 4), np.float32)
    for args, word in [
        ((x[:, :7], w, None, out), "x: want float32"),
        ((x.astype(np.float64), w, None, out), "have float64"),
        ((np.ones((2, 16), np.float32)[:, ::2], w, None, out), "not C-contiguous"),
        ((x, w, None, out[:1]), r"out: want float32 \[2, 4\]"),
        ((x, w, np.ones(5, np.float32), out), "bias"),
    ]:
        with pytest.raises(ValueError, match=word):
            linear(*args)
    for bad in (np.ones((2, 3)), np.ones(3, np.float32), np.ones((0, 3), np.float32)):
        with pytest.raises(ValueError, match="weight"):
            pack_linear(bad)
    assert isinstance(w, PackedLinear) and (w.n, w.k) == (4, 8)
