"""Products with 3 to 64 rows beside their twin: fresh random inputs, poisoned outputs, odd sizes, bits that do not depend on the batch."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_bench import BF16, KernelBench, assert_close, assert_same

from graphrt.kernels.array import Array
from graphrt.kernels.cuda import gemm64, gemm64_choice
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.gemm64_choice import cluster_of
from graphrt.kernels.cuda.gemm64_tuning import Gemm64Tuning
from graphrt.kernels.cuda.gemm64_twin import gemm64_twin
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Rope

EPS = 1e-5


ASYNC = "GRAPHRT_TEST_ASYNC_COPIES"  # an environment variable


@pytest.fixture(params=["bulk", "async"])
def bench(driver: Driver, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelBench:
    """With both kinds of copies. A kernel that fails leaves a GPU useless to the tests after it: what is not in use runs there on demand."""
    if request.param == "async" and driver.name != "fake" and ASYNC not in os.environ:
        pytest.skip(f"copies that are not in use: set {ASYNC} to run them on a GPU")
    monkeypatch.setattr(gemm64_choice, "BULK", request.param == "bulk")
    return KernelBench(driver)


def linear(bench: KernelBench, n: int, k: int, bias: bool = False) -> Linear:
    """Padding rows are poisoned, padding columns zero, as the loader leaves them."""
    padded = np.full((-(-n // 8) * 8, -(-k // 32) * 32), np.nan, np.float32)
    padded[:, k:] = 0
    padded[:n, :k] = bench.rng.standard_normal((n, k), dtype=np.float32) * k**-0.5
    return Linear(n, k, bench.put(padded.astype(BF16)), bench.normal(n) if bias else None)


def check(bench: KernelBench, calls: list[KernelCall], *written: Array) -> None:
    (call,) = calls
    for got, want in bench.run(call, gemm64_twin, list(written)):
        assert_close(got, want)


def with_bad_rows(bench: KernelBench, x: Array, *rows: int) -> Array:
    """Rows of padding may hold anything: these hold no numbers."""
    values = bench.driver.download(x)
    values[list(rows)] = np.nan
    return bench.put(values)


# Rows, n, k: a bias where k is 240.
RESIDUAL = [
    (3, 24, 32),
    (4, 40, 240),
    (8, 2048, 2048),
    (8, 1000, 8192),
    (13, 576, 1536),
    (16, 576, 576),
    (24, 264, 1104),
    (32, 2048, 2048),
    (32, 512, 8192),
    (48, 96, 4096),
    (64, 40, 240),
    (64, 256, 14336),
]


@pytest.mark.parametrize(("rows", "n", "k"), RESIDUAL)
def test_residual(bench: KernelBench, rows: int, n: int, k: int) -> None:
    w, x = linear(bench, n, k, bias=k == 240), bench.normal(rows, n)
    act = with_bad_rows(bench, bench.normal(rows, k, dtype=BF16), 1)
    check(bench, gemm64.gemm64_residual(bench.driver, act, w, x), x)


def test_more_units_than_warps_and_activations_that_do_not_stay(bench: KernelBench) -> None:
    """Every size of cluster, long streams through few stages, groups that are not full."""
    n, k, rows = 1000, 1024, 16
    w, act, tried = linear(bench, n, k), bench.normal(rows, k, dtype=BF16), []
    for cluster in (2, 4, 8):
        for unit, warps, stage_k, stages, slots in (
            (16, 3, 64, 2, 2),
            (32, 2, 128, 3, 3),
            (16, 5, 32, 7, 4),
            (32, 2, 1024 // cluster, 2, 1),
            (16, 8, 128, 2, 8 // cluster),
            (16, 1, 96, 2, 2),
        ):
            tuning = Gemm64Tuning(
                cluster, unit, warps, stage_k, stages, slots, 3, bulk=gemm64_choice.BULK, evict_first=warps == 5
            )
            x = bench.normal(rows, n)
            tried.append((gemm64.gemm64_residual(bench.driver, act, w, x, tuning), x))
    bench.driver.prepare([call.spec for calls, _ in tried for call in calls])
    for calls, x in tried:
        check(bench, calls, x)


@pytest.mark.parametrize(
    ("rows", "f", "k"),
    [(3, 24, 32), (8, 2048, 2048), (16, 1536, 576), (24, 700, 240), (32, 1024, 2048), (48, 36, 96), (64, 512, 2048)],
)
def test_norm_gate_up_silu(bench: KernelBench, rows: int, f: int, k: int) -> None:
    w = MlpWeights(bench.normal(k), linear(bench, 2 * f, k, bias=k == 240))
    x = with_bad_rows(bench, bench.normal(rows, k, scale=3), rows - 1)
    out = bench.poisoned(rows, f, dtype=BF16)
    check(bench, gemm64.gemm64_norm_gate_up_silu(bench.driver, x, w, EPS, out), out)


@pytest.mark.parametrize(("v", "k"), [(4096, 2048), (1003, 576), (33, 64), (200, 4096)])
@pytest.mark.parametrize("samples", [3, 8, 20, 64])
def test_norm_head(bench: KernelBench, samples: int, v: int, k: int) -> None:
    """Any rows in any order; zeros for PAD."""
    picked = bench.rng.integers(-1, 70, samples).astype(np.int32)
    picked[1] = -1
    out, head = bench.poisoned(samples, v), linear(bench, v, k, bias=v == 33)
    x = bench.normal(70, k)
    check(bench, gemm64.gemm64_norm_head(bench.driver, x, bench.put(picked), bench.normal(k), EPS, head, out), out)


def test_linear(bench: KernelBench) -> None:
    out, w = bench.poisoned(12, 960), linear(bench, 960, 576, bias=True)
    check(bench, gemm64.gemm64_linear(bench.driver, bench.normal(12, 576, dtype=BF16), w, out), out)


# H, K, E, D, block tokens.
HEADS = [(32, 8, 64, 2048, 32), (9, 3, 64, 576, 16), (3, 1, 80, 240, 16), (4, 2, 96, 384, 64), (8, 2, 128, 1024, 32)]


class Layer:
    """One attention layer and a step: rows at random places of their slots, every third one padding."""

    def __init__(self, bench: KernelBench, rows: int, h: int, kv: int, e: int, d: int, tokens: int, norm: bool) -> None:
        rng, blocks = bench.rng, 4
        slots = np.where(np.arange(rows) % 3 == 2, -1, np.arange(rows)).astype(np.int32)
        table = rng.permutation(rows * blocks).astype(np.int32).reshape(rows, blocks)
        angle = rng.uniform(0, 6, (blocks * tokens, e // 2)).astype(np.float32)
        self.step: Any = SimpleNamespace(
            positions=bench.ints(rng.integers(0, blocks * tokens, rows)),
            row_slot=bench.put(slots),
            block_table=bench.put(table),
        )
        self.cache = bench.poisoned(rows * blocks, 2, 2, kv, tokens, e, dtype=BF16)
        self.rope = Rope(bench.put(np.cos(angle)), bench.put(np.sin(angle)))
        self.shape = HeadShape(h, kv, e, 1)
        norms = (bench.normal(e), bench.normal(e)) if norm else (None, None)
        self.w = AttentionWeights(bench.normal(d), linear(bench, (h + 2 * kv) * e, d, bias=e == 80), *norms)
        self.q = bench.poisoned(rows, h, e, dtype=BF16)
        self.x = with_bad_rows(bench, bench.normal(rows, d), 2)

    def calls(self, driver: Driver, qkv: Array | None) -> list[KernelCall]:
        return gemm64.gemm64_norm_qkv_rope_append(
            driver, self.x, self.w, EPS, self.rope, self.shape, self.step, self.cache, self.q, qkv
        )


@pytest.mark.parametrize("rows", [4, 16, 40])
@pytest.mark.parametrize("sizes", HEADS)
def test_norm_qkv_rope_append(bench: KernelBench, rows: int, sizes: tuple[int, int, int, int, int]) -> None:
    """A padding row leaves no trace in the cache, and no other place of the cache changes."""
    layer = Layer(bench, rows, *sizes, norm=False)
    check(bench, layer.calls(bench.driver, None), layer.q, layer.cache)


@pytest.mark.parametrize(("sizes", "norm"), [(HEADS[1], True), ((5, 1, 72, 240, 16), False)])
def test_heads_that_are_normalised_take_two_kernels(
    bench: KernelBench, sizes: tuple[int, int, int, int, int], norm: bool
) -> None:
    rows, driver = 8, bench.driver
    layer = Layer(bench, rows, *sizes, norm=norm)
    qkv = bench.poisoned(rows, layer.w.qkv.n)
    product, finish = layer.calls(driver, qkv)
    check(bench, [product], qkv)
    driver.prepare([finish.spec])
    for call in (product, finish):
        driver.launch(call)
    q = driver.download(layer.q).astype(np.float32)
    good = np.arange(rows) != 2
    assert np.isfinite(q[good]).all() and np.isnan(q[~good]).all()
    with pytest.raises(ValueError, match="need a place"):
        layer.calls(driver, None)


@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (264, 576), (512, 8192)])
def test_a_row_has_the_same_bits_in_any_batch(bench: KernelBench, n: int, k: int) -> None:
    """The order of sums is the weight's, not the batch's."""
    driver, w, norm = bench.driver, linear(bench, n, k), bench.normal(k)
    act, x = bench.normal(64, k, dtype=BF16), bench.normal(64, k)
    calls, written = [], []
    for rows in (3, 8, 16, 32, 48, 64):
        plain, normed = bench.poisoned(rows, n), bench.poisoned(rows, n)
        picked = bench.ints(np.arange(rows))
        calls += gemm64.gemm64_linear(driver, act[:rows], w, plain)
        calls += gemm64.gemm64_norm_head(driver, x, picked, norm, EPS, w, normed)
        written.append((plain, normed))
    driver.prepare([c.spec for c in calls])
    for call in calls:
        driver.launch(call)
    results = [[driver.download(a)[:3] for a in pair] for pair in written]
    same = assert_close if driver.name == "fake" else assert_same  # the twin's sums are the BLAS library's
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            same(got, want)


def test_what_does_not_fit_goes_another_way(driver: Driver) -> None:
    def weight(n: int, k: int) -> Linear:
        memory: Any = SimpleNamespace(shape=(-(-n // 8) * 8, -(-k // 32) * 32))
        return Linear(n, k, memory, None)

    mode = gemm64.Mode
    assert gemm64.fits(driver, mode.GATE_UP, True, 64, weight(28672, 4096))
    assert not gemm64.fits(driver, mode.PLAIN, True, 65, weight(4096, 4096))
    assert not gemm64.fits(driver, mode.PLAIN, False, 8, weight(64, 36))
    assert not gemm64.fits(driver, mode.QKV, True, 8, weight(72 * 7, 256), head_dim=72)
    assert not gemm64.fits(driver, mode.PLAIN, True, 64, weight(64, 65536))
    assert gemm64.fits(driver, mode.RESIDUAL, False, 64, weight(64, 65536))
    assert {cluster_of(2048, k, driver.smem_per_block) for k in (8192, 14336)} == {8}
