"""`CudaOps` on the fake device beside `NumpyOps`: which kernels take which shape must not show in the result."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from graphrt.kernels import abi
from graphrt.kernels.array import Array, host_array
from graphrt.kernels.comm import OneRank
from graphrt.kernels.cuda import loading
from graphrt.kernels.cuda.fake_driver import FakeDriver
from graphrt.kernels.cuda.ops import CudaOps
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Rope

BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS = [1, 2, 3, 17, 64, 65, 130]
EPS = 1e-5


class Pair:
    """The same values on the fake device and in NumPy."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.cuda, self.numpy = CudaOps(self.driver), NumpyOps()
        seed = int(np.random.SeedSequence().generate_state(1)[0])
        print(f"seed {seed}")
        self.rng = np.random.default_rng(seed)

    def values(self, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        """Such as bf16 holds exactly, so that only the operation rounds."""
        wide = self.rng.standard_normal(shape, dtype=np.float32) * scale
        return wide.astype(BF16).astype(np.float32)

    def put(self, values: NDArray[Any], dtype: Any = None) -> tuple[Array, Array]:
        device = self.driver.alloc(values.shape, dtype or values.dtype)
        self.driver.upload(device, values.astype(device.dtype))
        return device, host_array(values.copy())

    def linear(self, n: int, k: int, bias: bool) -> tuple[Linear, Linear]:
        w, b = self.values(n, k, scale=k**-0.5), [self.values(n)] if bias else None
        return self.cuda.load_linear([w], b), self.numpy.load_linear([w], b)

    def close(self, got: Array, want: Array) -> None:
        a = self.driver.download(got).astype(np.float64).reshape(got.shape[0], -1)
        b = want.np.astype(np.float64).reshape(got.shape[0], -1)
        bound = 2**-6 * np.abs(b) + 2**-4 * np.sqrt((b * b).mean(axis=1, keepdims=True))  # beside float32 throughout
        assert (np.abs(a - b) <= bound).all(), f"off by {np.abs(a - b).max()}"


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize(("sizes", "k"), [((5, 9, 2), 33), ((8, 8), 64), ((1,), 1), ((100,), 32)])
def test_weights_are_stacked_padded_and_cut_into_pieces(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, dtype: Any, sizes: tuple[int, ...], k: int
) -> None:
    monkeypatch.setattr(loading, "PIECE", 256)  # a few rows at most
    parts = [pair.rng.standard_normal((n, k)).astype(dtype) for n in sizes]
    used = pair.driver.memory.used
    w = pair.cuda.load_linear(parts, [pair.values(n) for n in sizes])
    n = sum(sizes)
    assert (w.n, w.k, w.data.shape) == (n, k, loading.padded(n, k))
    got = pair.driver.download(w.data)
    assert got[:n, :k].tobytes() == np.concatenate(parts).astype(BF16).tobytes()
    assert not got[n:].astype(np.float32).any() and not got[:, k:].astype(np.float32).any()
    assert w.bias is not None and w.bias.shape == (n,) and w.bias.dtype == np.float32
    assert pair.driver.memory.used - used == pair.cuda.weight_bytes(n, k, np.dtype(dtype)) + w.bias.nbytes


def test_a_tied_head_is_the_embedding_itself(pair: Pair) -> None:
    table, odd = pair.values(64, 32).astype(BF16), pair.values(63, 32).astype(BF16)
    assert pair.cuda.load_linear([table]).data is not pair.cuda.load_table(table), "not before it was loaded"
    place = pair.cuda.load_table(table)
    used = pair.driver.memory.used
    assert pair.cuda.load_linear([table]).data.ptr in {a.ptr for _, a in pair.cuda._tables}
    assert pair.driver.memory.used == used and place.shape == (64, 32)
    pair.cuda.load_table(odd)
    head = pair.cuda.load_linear([odd])
    assert head.data.shape == (64, 32) and not pair.driver.download(head.data)[63].astype(np.float32).any()
    assert pair.cuda.table_bytes(64, 32, tied=True) == 0
    assert pair.cuda.table_bytes(63, 32, tied=True) == pair.cuda.table_bytes(63, 32, tied=False) == 63 * 32 * 2


def test_other_element_types_are_refused(pair: Pair) -> None:
    with pytest.raises(TypeError, match="weights of type int8"):
        pair.cuda.load_linear([np.zeros((8, 32), np.int8)])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k", "bias"), [(64, 96, False), (40, 72, True), (33, 100, True)])
def test_linear_residual(pair: Pair, rows: int, n: int, k: int, bias: bool) -> None:
    x, x_ = pair.put(pair.values(rows, k), BF16)
    residual, residual_ = pair.put(pair.values(rows, n))
    w, w_ = pair.linear(n, k, bias)
    pair.cuda.linear_residual(x, w, residual, OneRank())
    pair.numpy.linear_residual(x_, w_, residual_, OneRank())
    pair.close(residual, residual_)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("f", "d", "bias"), [(64, 96, False), (36, 72, True), (100, 68, True)])
def test_norm_gate_up_silu(pair: Pair, rows: int, f: int, d: int, bias: bool) -> None:
    x, x_ = pair.put(pair.values(rows, d, scale=3))
    norm, norm_ = pair.put(pair.values(d))
    w, w_ = pair.linear(2 * f, d, bias)
    out, out_ = pair.put(np.full((rows, f), np.nan, np.float32), BF16)
    pair.cuda.norm_gate_up_silu(x, MlpWeights(norm, w), EPS, out)
    pair.numpy.norm_gate_up_silu(x_, MlpWeights(norm_, w_), EPS, out_)
    pair.close(out, out_)


@pytest.mark.parametrize("samples", ROWS)
@pytest.mark.parametrize(("v", "d", "bias"), [(320, 64, False), (101, 72, True)])
def test_norm_head_with_padding(pair: Pair, samples: int, v: int, d: int, bias: bool) -> None:
    picked = pair.rng.integers(-1, 40, samples).astype(np.int32)
    picked[pair.rng.integers(samples)] = abi.PAD
    x, x_ = pair.put(pair.values(40, d, scale=3))
    rows, rows_ = pair.put(picked)
    norm, norm_ = pair.put(pair.values(d))
    head, head_ = pair.linear(v, d, bias)
    out, out_ = pair.put(np.full((samples, v), np.nan, np.float32))
    pair.cuda.norm_head(x, rows, norm, EPS, head, out)
    pair.numpy.norm_head(x_, rows_, norm_, EPS, head_, out_)
    pair.close(out, out_)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize(
    ("h", "kh", "e", "d", "bias"), [(4, 2, 32, 64, False), (3, 1, 16, 72, True), (6, 6, 24, 60, True)]
)
def test_norm_qkv_rope_append(
    pair: Pair, rows: int, h: int, kh: int, e: int, d: int, bias: bool, head_norms: bool
) -> None:
    """Queries, and exactly the places of the cache that live rows own."""
    tokens, slots, blocks = 16, 8, 9
    step: Any = type("Step", (), {})
    step_: Any = type("Step", (), {})
    # No two rows share a place.
    at = pair.rng.permutation(slots * blocks * tokens)[:rows]
    slot = (at // (blocks * tokens)).astype(np.int32)
    slot[pair.rng.random(rows) < 0.2] = abi.PAD
    step.row_slot, step_.row_slot = pair.put(slot)
    step.positions, step_.positions = pair.put((at % (blocks * tokens)).astype(np.int32))
    table = pair.rng.permutation(slots * blocks).astype(np.int32).reshape(slots, blocks)
    step.block_table, step_.block_table = pair.put(table)
    cache, cache_ = pair.put(np.full((slots * blocks, 2, 2, kh, tokens, e), np.nan, np.float32), BF16)
    angle = pair.rng.uniform(0, 6, (blocks * tokens, e // 2))
    (cos, cos_), (sin, sin_) = pair.put(np.cos(angle).astype(np.float32)), pair.put(np.sin(angle).astype(np.float32))
    x, x_ = pair.put(pair.values(rows, d, scale=3))
    norm, norm_ = pair.put(pair.values(d))
    qkv, qkv_ = pair.linear((h + 2 * kh) * e, d, bias)
    (qn, qn_), (kn, kn_) = ((pair.put(pair.values(e)) if head_norms else (None, None)) for _ in range(2))
    q, q_ = pair.put(np.full((rows, h, e), np.nan, np.float32), BF16)
    shape = HeadShape(h, kh, e, 1)
    pair.cuda.norm_qkv_rope_append(x, AttentionWeights(norm, qkv, qn, kn), EPS, Rope(cos, sin), shape, step, cache, q)
    pair.numpy.norm_qkv_rope_append(
        x_, AttentionWeights(norm_, qkv_, qn_, kn_), EPS, Rope(cos_, sin_), shape, step_, cache_, q_
    )
    pair.close(q, q_)
    got, want = pair.driver.download(cache).astype(np.float32), cache_.np
    assert np.array_equal(np.isnan(got), np.isnan(want))
    live = ~np.isnan(want)
    assert live.any() == bool((slot != abi.PAD).any())
    scale = np.sqrt((want[live] ** 2).mean()) if live.any() else 0.0
    assert (np.abs(got[live] - want[live]) <= 2**-6 * np.abs(want[live]) + 2**-5 * scale).all()


def test_a_dry_run_launches_nothing_and_names_all_kernels(pair: Pair) -> None:
    w, _ = pair.linear(64, 96, True)
    out = pair.driver.alloc((200, 64), np.float32)

    def step(rows: int) -> None:
        pair.cuda.arena.reset()
        pair.cuda.linear_residual(pair.cuda.activation(rows, 96), w, out[:rows], OneRank())

    before = pair.driver.launches, pair.driver.allocations
    with pair.cuda.dry_run() as seen:
        for rows in ROWS:
            step(rows)
    assert (pair.driver.launches, pair.driver.allocations) == (before[0], before[1] + 2), (
        "one block for temporaries, one for tickets"
    )
    assert seen.specs and {65, 130} <= {shape[0] for shape in seen.products}
    with pair.cuda.products_only() as warmed:
        for rows in ROWS:
            step(rows)
            step(rows)
    assert warmed.products == seen.products
    assert pair.driver.launches == before[0] + len(seen.products)
    for rows in ROWS:
        graph = pair.driver.capture(lambda rows=rows: step(rows))  # type: ignore[misc]
        assert graph.nodes >= 1
    assert pair.cuda.arena.grown == 0
