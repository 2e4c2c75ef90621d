import ml_dtypes
import numpy as np
import pytest

from graphrt.kernels.cpu.elementwise import embed, rms_norm, rope, silu_mul

rng = np.random.default_rng()


def normal(*shape, scale=1.0):
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def poisoned(*shape):
    return np.full(shape, np.nan, np.float32)


@pytest.mark.parametrize("width", [1, 7, 64, 577, 1536])
def test_rms_norm(width):
    x, weight = normal(60, width, scale=3), normal(width)
    out = poisoned(60, width)
    rms_norm(x, weight, 1e-5, out)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-5) * weight
    assert np.allclose(out, want, rtol=3e-6, atol=1e-7)
    for r in (0, 17, 59):  # 60 rows of 577 take the threads, one row does not
        alone = poisoned(1, width)
        rms_norm(x[r : r + 1], weight, 1e-5, alone)
        assert alone.tobytes() == out[r].tobytes()
    weight.flags.writeable = False
    rms_norm(x, weight, 1e-5, x)
    assert x.tobytes() == out.tobytes()


def test_rms_norm_of_zeros_is_zero():
    out = poisoned(2, 8)
    rms_norm(np.zeros((2, 8), np.float32), np.ones(8, np.float32), 1e-5, out)
    assert not out.any()


@pytest.mark.parametrize("width", [1, 15, 16, 37, 1536])
def test_silu_mul(width):
    gate_up = normal(40, 2 * width, scale=8)
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    out = poisoned(40, width)
    silu_mul(gate_up, out)
    gate, up = gate_up[:, :width].astype(np.float64), gate_up[:, width:].astype(np.float64)
    want = gate / (1 + np.exp(-gate)) * up
    assert np.allclose(out, want, rtol=1e-6, atol=1e-12)
    for r in (0, 1, 39):
        alone = poisoned(1, width)
        silu_mul(gate_up[r : r + 1], alone)
        assert alone.tobytes() == out[r].tobytes()
    gate_up[3, 0] = np.nan
    silu_mul(gate_up, out)
    assert np.isnan(out).sum() == 1 and np.isnan(out[3, 0])


@pytest.mark.parametrize("heads,head_dim", [(9, 64), (3, 80), (1, 2), (32, 128)])
def test_rope(heads, head_dim):
    rows, half = 30, head_dim // 2
    x = normal(rows, heads, head_dim)
    positions = rng.integers(0, 50, rows).astype(np.int32)
    angle = rng.uniform(0, 9, (50, half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    low, high = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    c, s = cos[positions][:, None], sin[positions][:, None]
    want = np.concatenate([low * c - high * s, high * c + low * s], -1)
    alone = x[4:5].copy()
    cos.flags.writeable = False
    rope(x, positions, cos, sin)
    assert np.allclose(x, want, atol=1e-6)
    rope(alone, positions[4:5], cos, sin)
    assert alone.tobytes() == x[4].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_embed(dtype):
    table = normal(50, 33).astype(dtype)
    table.flags.writeable = False
    tokens = np.array([49, 0, 7, 7], np.int32)
    out = poisoned(4, 33)
    embed(tokens, table, out)
    assert np.array_equal(out, table[tokens].astype(np.float32))
    if dtype != np.float32:
        again = poisoned(4, 33)
        embed(tokens, table.view(np.uint16), again)
        assert np.array_equal(again, out)
    for bad in (50, -1):
        with pytest.raises(ValueError, match=f"tokens: want 0 to 49.*{bad}"):
            embed(np.array([3, bad], np.int32), table, out[:2])


def test_no_rows():
    none = np.empty((0, 8), np.float32)
    rms_norm(none, np.ones(8, np.float32), 1e-5, none)
    silu_mul(none, np.empty((0, 4), np.float32))
    rope(none.reshape(0, 1, 8), np.empty(0, np.int32), np.ones((1, 4), np.float32), np.ones((1, 4), np.float32))
    embed(np.empty(0, np.int32), np.ones((3, 8), np.float32), none)


def test_refusals_name_what_is_wrong():
    x, ones = normal(2, 8), np.ones(8, np.float32)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, ones[:4], 1e-5, x)
    with pytest.raises(ValueError, match="out"):
        rms_norm(x, ones, 1e-5, x[:1])
    with pytest.raises(ValueError, match="gate_up"):
        silu_mul(x, normal(2, 8))
    table = np.ones((4, 4), np.float32)
    for position in (4, -1):
        with pytest.raises(ValueError, match=f"positions: want 0 to 3.*{position}"):
            rope(normal(1, 2, 8), np.array([position], np.int32), table, table)
    with pytest.raises(ValueError, match="cos"):
        rope(normal(1, 2, 6), np.zeros(1, np.int32), table, table)
    with pytest.raises(ValueError, match="table"):
        embed(np.zeros(1, np.int32), np.ones((4, 4)), x[:1])
