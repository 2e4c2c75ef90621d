"""The twin of `gemm64` beside `NumpyOps`, and how its work is cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_bench import BF16, KernelBench
from numpy.typing import NDArray

from graphrt.kernels.array import Array, host_array, host_empty
from graphrt.kernels.comm import OneRank
from graphrt.kernels.cuda import gemm64
from graphrt.kernels.cuda.fake_driver import FakeDriver
from graphrt.kernels.cuda.gemm64_choice import choose, cluster_of, warps_of
from graphrt.kernels.cuda.gemm64_tuning import KB, Gemm64Tuning, clusters_of, parts_of
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Rope

EPS = 1e-5
ROWS = [3, 8, 21]
SHAPES = [  # n, k of a 1B model's products, an 8B one's, and small ones
    (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048),
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
    (960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (24, 32), (400, 256),
]  # fmt: skip


@pytest.fixture
def bench() -> KernelBench:
    return KernelBench(FakeDriver())


class Host:
    """What lies on the device, as NumPy arrays, weights without their padding."""

    def __init__(self, bench: KernelBench) -> None:
        self.driver = bench.driver

    def array(self, a: Array) -> Array:
        values = self.driver.download(a)
        return host_array(values.astype(np.float32) if values.dtype == BF16 else values)

    def linear(self, w: Linear) -> Linear:
        data = self.driver.download(w.data).astype(np.float32)[: w.n, : w.k]
        return Linear(w.n, w.k, np.ascontiguousarray(data), None if w.bias is None else self.array(w.bias))


def linear(bench: KernelBench, n: int, k: int, bias: bool) -> Linear:
    data = np.zeros((-(-n // 8) * 8, -(-k // 32) * 32), np.float32)
    data[:n, :k] = bench.rng.standard_normal((n, k)) * k**-0.5
    return Linear(n, k, bench.put(data.astype(BF16)), bench.normal(n) if bias else None)


def assert_close(got: NDArray[Any], want: NDArray[Any]) -> None:
    """NumPy keeps in float32 what the twin rounds to bf16 before a product."""
    a, b = (v.astype(np.float64).reshape(-1, v.shape[-1]) for v in (got, want))
    wrong = np.abs(a - b) > 2**-6 * np.abs(b) + 2**-5 * np.sqrt(np.mean(b * b, axis=-1, keepdims=True))
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0].tolist()}"


@pytest.mark.parametrize("rows", ROWS)
def test_residual(bench: KernelBench, rows: int) -> None:
    host, ops = Host(bench), NumpyOps()
    act, w, x = bench.normal(rows, 240, dtype=BF16), linear(bench, 77, 240, True), bench.normal(rows, 77)
    want = host.array(x)
    ops.linear_residual(host.array(act), host.linear(w), want, OneRank())
    for call in gemm64.gemm64_residual(bench.driver, act, w, x):
        bench.driver.launch(call)
    assert_close(bench.driver.download(x), want.np)


@pytest.mark.parametrize("rows", ROWS)
def test_norm_gate_up_silu(bench: KernelBench, rows: int) -> None:
    host, ops = Host(bench), NumpyOps()
    x, w = bench.normal(rows, 96, scale=3), MlpWeights(bench.normal(96), linear(bench, 88, 96, True))
    out, want = bench.poisoned(rows, 44, dtype=BF16), host_empty((rows, 44))
    ops.norm_gate_up_silu(host.array(x), MlpWeights(host.array(w.norm), host.linear(w.gate_up)), EPS, want)
    for call in gemm64.gemm64_norm_gate_up_silu(bench.driver, x, w, EPS, out):
        bench.driver.launch(call)
    assert_close(bench.driver.download(out), want.np)


@pytest.mark.parametrize("picked", [[2, -1, 0], [0, 1, 2, 3, -1, 3]])
def test_norm_head(bench: KernelBench, picked: list[int]) -> None:
    host, ops = Host(bench), NumpyOps()
    x, norm, head, rows = bench.normal(4, 64), bench.normal(64), linear(bench, 99, 64, True), bench.ints(picked)
    out, want = bench.poisoned(len(picked), 99), host_empty((len(picked), 99))
    ops.norm_head(host.array(x), host.array(rows), host.array(norm), EPS, host.linear(head), want)
    for call in gemm64.gemm64_norm_head(bench.driver, x, rows, norm, EPS, head, out):
        bench.driver.launch(call)
    assert_close(bench.driver.download(out), want.np)


@pytest.mark.parametrize(("e", "normed"), [(16, False), (24, False), (16, True)])
def test_norm_qkv_rope_append(bench: KernelBench, e: int, normed: bool) -> None:
    """With heads that the product's kernel finishes, and with those that need a second one."""
    host, ops, driver = Host(bench), NumpyOps(), bench.driver
    h, kv, d, slots = 3, 1, 48, [1, -1, 0, 2]
    rows = len(slots)
    step: Any = SimpleNamespace(
        positions=bench.ints([5, 0, 30, 17]),
        row_slot=bench.ints(slots),
        block_table=bench.ints([[3, 1], [2, 0], [4, 5]]),
    )
    angle = bench.rng.uniform(0, 6, (32, e // 2)).astype(np.float32)
    rope = Rope(bench.put(np.cos(angle)), bench.put(np.sin(angle)))
    norms = (bench.normal(e), bench.normal(e)) if normed else (None, None)
    w = AttentionWeights(bench.normal(d), linear(bench, (h + 2 * kv) * e, d, True), *norms)
    x, q = bench.normal(rows, d), bench.poisoned(rows, h, e, dtype=BF16)
    cache = bench.normal(6, 2, 2, kv, 16, e, dtype=BF16)
    want_cache, want_q = host.array(cache), host_empty((rows, h, e))
    ops.norm_qkv_rope_append(
        host.array(x),
        AttentionWeights(
            host.array(w.norm), host.linear(w.qkv), *(None if n is None else host.array(n) for n in norms)
        ),
        EPS,
        Rope(host.array(rope.cos), host.array(rope.sin)),
        HeadShape(h, kv, e, 1),
        SimpleNamespace(**{name: host.array(a) for name, a in vars(step).items()}),  # type: ignore[arg-type]
        want_cache,
        want_q,
    )
    place = bench.poisoned(rows, w.qkv.n) if normed or e % 16 else None
    calls = gemm64.gemm64_norm_qkv_rope_append(driver, x, w, EPS, rope, HeadShape(h, kv, e, 1), step, cache, q, place)
    assert len(calls) == (1 if place is None else 2)
    for call in calls:
        driver.launch(call)
    assert_close(driver.download(q), want_q.np)
    assert_close(driver.download(cache), want_cache.np)


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("limit", [99 * KB, 227 * KB])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_shape_has_a_cut_that_fits(n: int, k: int, limit: int, bulk: bool) -> None:
    for normed in (False, True) if k <= 4096 else (False,):  # normalised activations must stay
        for rows in range(8, 72, 8):
            t = choose(normed, rows, n, k, limit, bulk=bulk)
            assert t.bulk == bulk and t.smem(rows) <= limit and rows % t.cluster == 0
            assert t.cluster == cluster_of(n, k, limit, bulk), "it does not depend on the rows"
            parts = parts_of(k, t.cluster, t.stage_k)
            assert t.act_slots == parts or (not normed and 2 <= t.act_slots < parts)
            assert t.stages >= 2 and t.threads == 32 * (t.warps + bulk)


def test_few_rows_leave_room_for_a_second_grid() -> None:
    for n, k in SHAPES:
        assert choose(k <= 4096, 8, n, k, 227 * KB, bulk=True).smem(8) <= 112 * KB
        for rows in (8, 16, 24, 32):
            assert choose(k <= 4096, rows, n, k, 227 * KB, bulk=False).smem(rows) <= 112 * KB


def test_warps_share_units_evenly() -> None:
    assert [warps_of(each, 8) for each in (1, 6, 8, 10, 12, 24, 251)] == [1, 6, 8, 5, 6, 8, 8]


@pytest.mark.parametrize(
    ("sms", "cluster", "units"), [(132, 4, 128), (132, 8, 1), (132, 1, 8016), (12, 4, 5), (148, 2, 77)]
)
def test_clusters_fit_the_card_and_none_is_idle(sms: int, cluster: int, units: int) -> None:
    clusters = clusters_of(sms, cluster, units)
    assert 1 <= clusters <= min(units, max(sms // cluster, 1))
    each = -(-units // clusters)
    assert each * (clusters - 1) < units or each == 1


@pytest.mark.parametrize(("bulk", "rings"), [(True, 1), (False, 8)])
def test_shared_memory_counts_every_part(bulk: bool, rings: int) -> None:
    """A formula that the kernel checks with a static assertion: here only that each record's part is in it."""
    t = Gemm64Tuning(4, 16, 8, 256, 6, 2, bulk=bulk)
    assert t.stage_bytes == 16 * 512 + 64
    assert t.smem(32) - t.smem(24) > 2 * 8 * 512 + 8 * 16 * 8 * 4
    assert Gemm64Tuning(4, 16, 8, 256, 7, 2, bulk=bulk).smem(32) - t.smem(32) == rings * t.stage_bytes
