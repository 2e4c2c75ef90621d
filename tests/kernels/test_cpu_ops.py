"""Every operation of `CpuOps` against its NumPy twin: fresh random inputs, odd sizes, outputs poisoned beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from graphrt.kernels import abi
from graphrt.kernels.array import Array, host_array
from graphrt.kernels.comm import OneRank
from graphrt.kernels.cpu_ops import CpuOps, make_cpu_ops, usable_cores
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.ops import AttentionWeights, HeadShape, MlpWeights, Ops, Rope
from graphrt.kernels.step_state import StepView

BF16 = ml_dtypes.bfloat16
BLOCK = 16
SLOTS, MAX_BLOCKS = 4, 7


@pytest.fixture(scope="module")
def compiled() -> NumpyOps:
    ops = make_cpu_ops()
    assert isinstance(ops, CpuOps), "numba is part of the installation"
    return ops


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return rng.normal(size=shape).astype(dtype)


def both(compiled: Ops, run: Callable[[Ops, Array], None], shape: tuple[int, ...]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The outputs of the compiled operation and of its twin, each into poisoned memory."""
    outs = []
    for ops in (compiled, NumpyOps()):
        out = host_array(np.full(shape, np.nan, np.float32))
        run(ops, out)
        outs.append(out.np)
    return outs[0], outs[1]


def close(got: NDArray[Any], want: NDArray[Any], tolerance: float = 2e-6) -> None:
    """Within a few float32 roundings of the row's size."""
    size = np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True)) + 1e-30
    assert np.isfinite(got).all()
    assert (np.abs(got - want) / size).max() <= tolerance * 10


def view(rng: np.random.Generator, rows: int, cache_shape: tuple[int, ...], padding: bool = True) -> StepView:
    """Rows at random positions of random slots; blocks dealt out at random."""
    blocks = cache_shape[0]
    table = rng.permutation(blocks)[: SLOTS * MAX_BLOCKS].reshape(SLOTS, MAX_BLOCKS).astype(np.int32)
    flat = rng.permutation(SLOTS * MAX_BLOCKS * BLOCK)[:rows]
    slot, position = (flat // (MAX_BLOCKS * BLOCK)).astype(np.int32), (flat % (MAX_BLOCKS * BLOCK)).astype(np.int32)
    if padding:
        slot[1:][rng.random(rows - 1) < 0.3] = abi.PAD
    empty = host_array(np.zeros(1, np.int32))
    cache = host_array(normal(rng, *cache_shape))
    unused = dict.fromkeys((f.name for f in fields(StepView)), empty)
    mine = {"positions": host_array(position), "row_slot": host_array(slot), "block_table": host_array(table)}
    return StepView(**(unused | mine | {"kind": "prefill", "rows": rows, "samples": 1, "caches": {"kv": cache}}))  # type: ignore[arg-type]


ROWS = [1, 2, 3, 5, 13, 64]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (96, 100), (130, 257)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_linear(
    compiled: Ops, rng: np.random.Generator, rows: int, dtype: Any, n: int, k: int, accumulate: bool
) -> None:
    w, x, base = normal(rng, n, k, dtype=dtype), normal(rng, rows, k), normal(rng, rows, n)
    bias = [normal(rng, n)] if rng.random() < 0.5 else None

    def run(ops: Ops, out: Array) -> None:
        if accumulate:
            out.np[:] = base
        ops.linear(host_array(x), ops.load_linear([w], bias), out, accumulate)

    got, want = both(compiled, run, (rows, n))
    assert np.abs(got - want).max() <= 2e-6 * (np.abs(x).max() * np.abs(w.astype(np.float32)).max() * k + 4)


def test_linear_stacks_parts_of_mixed_types(compiled: Ops, rng: np.random.Generator) -> None:
    parts = [normal(rng, 5, 40, dtype=BF16), normal(rng, 31, 40), normal(rng, 2, 40, dtype=np.float16)]
    x = normal(rng, 3, 40)
    got, want = both(compiled, lambda ops, out: ops.linear(host_array(x), ops.load_linear(parts), out), (3, 38))
    close(got, want)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 16, 63, 576])
def test_rms_norm(compiled: Ops, rng: np.random.Generator, rows: int, width: int) -> None:
    x, w = normal(rng, rows, width), normal(rng, width)
    got, want = both(compiled, lambda ops, out: ops.rms_norm(host_array(x), host_array(w), 1e-5, out), (rows, width))
    close(got, want)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float16])
def test_embed(compiled: Ops, rng: np.random.Generator, rows: int, dtype: Any) -> None:
    table, tokens = normal(rng, 50, 33, dtype=dtype), rng.integers(0, 50, rows).astype(np.int32)
    got, want = both(compiled, lambda ops, out: ops.embed(host_array(tokens), ops.load_table(table), out), (rows, 33))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("head_dim", [2, 64, 80, 128])
def test_rope(compiled: Ops, rng: np.random.Generator, rows: int, head_dim: int) -> None:
    x, positions = normal(rng, rows, 3, head_dim), rng.integers(0, 90, rows).astype(np.int32)
    angles = normal(rng, 90, head_dim // 2)
    rope = Rope(host_array(np.cos(angles)), host_array(np.sin(angles)))

    def run(ops: Ops, out: Array) -> None:
        out.np[:] = x
        ops.rope(out, host_array(positions), rope)

    got, want = both(compiled, run, x.shape)
    close(got, want)


@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(compiled: Ops, rng: np.random.Generator, rows: int) -> None:
    x = normal(rng, rows, 2 * 77) * 5
    x[0, :4] = [200, -200, 88, -88]
    got, want = both(compiled, lambda ops, out: ops.silu_mul(host_array(x), out), (rows, 77))
    close(got, want)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 64), (9, 3, 64), (8, 1, 80), (4, 4, 128), (2, 1, 96)]
)
def test_append_and_attention(
    compiled: Ops, rng: np.random.Generator, rows: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    shape = (SLOTS * MAX_BLOCKS + 2, 3, 2, kv_heads, BLOCK, head_dim)
    b = view(rng, rows, shape)
    k, v, q = (normal(rng, rows, h, head_dim) for h in (kv_heads, kv_heads, heads))
    caches = []

    def run(ops: Ops, out: Array) -> None:
        cache = host_array(b.caches["kv"].np.copy())
        ops.kv_append(host_array(k), host_array(v), b, cache, 1)
        caches.append(cache.np.copy())
        poison_unseen(cache.np, b)
        ops.paged_attention(host_array(q), b, cache, 1, head_dim**-0.5, out)

    got, want = both(compiled, run, q.shape)
    np.testing.assert_array_equal(caches[0], caches[1])
    pads = b.row_slot.np == abi.PAD
    assert (got[pads] == 0).all()
    close(got[~pads], want[~pads], 5e-6)


def poison_unseen(cache: NDArray[np.float32], b: StepView) -> None:
    """NaN wherever no row of the step may look: other layers, other blocks, positions beyond the farthest row of a slot."""
    seen = np.zeros((cache.shape[0], BLOCK), bool)
    for slot, position in zip(b.row_slot.np, b.positions.np, strict=True):
        if slot != abi.PAD:
            at = np.arange(position + 1)
            seen[b.block_table.np[slot, at // BLOCK], at % BLOCK] = True
    cache[:, [0, 2]] = np.nan
    cache[:, 1].transpose(0, 3, 1, 2, 4)[~seen] = np.nan


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("head_norms", [False, True])
def test_fused_operations(compiled: Ops, rng: np.random.Generator, rows: int, head_norms: bool) -> None:
    d, h, kh, e, f, v = 96, 6, 2, 64, 160, 301
    b = replace(
        view(rng, rows, (SLOTS * MAX_BLOCKS, 2, 2, kh, BLOCK, e)),
        sample_rows=host_array(np.array([rows - 1, abi.PAD], np.int32)),
    )
    x, attended = normal(rng, rows, d), normal(rng, rows, h, e)
    weights = {n: normal(rng, *s, dtype=BF16) * BF16(0.1) for n, s in
               {"qkv": ((h + 2 * kh) * e, d), "o": (d, h * e), "gu": (2 * f, d), "down": (d, f), "head": (v, d)}.items()}  # fmt: skip
    norm, head_norm = normal(rng, d), normal(rng, e)
    angles = normal(rng, MAX_BLOCKS * BLOCK, e // 2)
    rope = Rope(host_array(np.cos(angles)), host_array(np.sin(angles)))
    results: dict[str, list[NDArray[Any]]] = {}
    for ops in (compiled, NumpyOps()):

        def out(*shape: int) -> Array:
            return host_array(np.full(shape, np.nan, np.float32))

        q, hidden, logits, residual = out(rows, h, e), out(rows, f), out(2, v), out(rows, d)
        cache = host_array(b.caches["kv"].np.copy())
        ops_norm = host_array(head_norm) if head_norms else None
        w = AttentionWeights(host_array(norm), ops.load_linear([weights["qkv"]]), ops_norm, ops_norm)
        ops.norm_qkv_rope_append(host_array(x), w, 1e-5, rope, HeadShape(h, kh, e, 1), b, cache, q)
        ops.norm_gate_up_silu(
            host_array(x), MlpWeights(host_array(norm), ops.load_linear([weights["gu"]])), 1e-5, hidden
        )
        residual.np[:] = x
        ops.linear_residual(host_array(attended), ops.load_linear([weights["o"]]), residual, OneRank())
        ops.norm_head(host_array(x), b.sample_rows, host_array(norm), 1e-5, ops.load_linear([weights["head"]]), logits)
        for name, a in {"q": q, "kv": cache, "hidden": hidden, "residual": residual, "logits": logits}.items():
            results.setdefault(name, []).append(a.np)
    for got, want in results.values():
        close(got, want, 1e-5)
    assert (results["logits"][0][1] == 0).all(), "no sample, no logits"


def test_widths_that_do_not_fit_are_refused(compiled: Ops, rng: np.random.Generator) -> None:
    w = compiled.load_linear([normal(rng, 8, 16)])
    with pytest.raises(ValueError):
        compiled.linear(host_array(normal(rng, 2, 15)), w, host_array(normal(rng, 2, 8)))
    with pytest.raises(TypeError, match="weights of type int32: must be float32, float16 or bfloat16"):
        compiled.load_linear([np.zeros((2, 2), np.int32)])


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, 999),
        ({"cpu.max": "max 100000"}, 999),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 999),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_a_containers_quota_limits_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], want: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(999))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_cores(tmp_path) == want
