"""Kernels that touch each element once, norms and heads, beside their twins: odd sizes, padding rows, poisoned outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_bench import BF16, KernelBench, assert_close, assert_same

from graphrt.kernels.cuda import elementwise, heads, rms_norm
from graphrt.kernels.cuda.driver import Driver
from graphrt.kernels.ops import HeadShape, Rope

F32 = np.dtype(np.float32)


@pytest.fixture
def bench(driver: Driver) -> KernelBench:
    return KernelBench(driver)


@pytest.mark.parametrize("width", [4, 33, 576, 2048, 8192])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_embed_is_exact(bench: KernelBench, rows: int, width: int) -> None:
    table, tokens = bench.normal(50, width, dtype=BF16), bench.ints(bench.rng.integers(0, 50, rows))
    out = bench.poisoned(rows, width)
    call = elementwise.embed(tokens, table, out)
    ((got, want),) = bench.run(call, elementwise.embed_twin, [out])
    assert_same(got, want)


@pytest.mark.parametrize("width", [4, 33, 576, 4096])
def test_gather_rows_is_exact(bench: KernelBench, width: int) -> None:
    x, out = bench.normal(7, width), bench.poisoned(9, width)
    call = elementwise.gather_rows(x, bench.ints([6, -1, 0, 3, 3, -1, 5, 1, 2]), out)
    ((got, want),) = bench.run(call, elementwise.gather_rows_twin, [out])
    assert_same(got, want)
    assert (got[[1, 5]] == 0).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 4), (3, 33), (129, 2048)])
def test_add_is_exact(bench: KernelBench, rows: int, width: int) -> None:
    x, out, bias = bench.normal(rows, width), bench.normal(rows, width), bench.normal(width)
    for call, twin in (
        (elementwise.add(x, out), elementwise.add_twin),
        (elementwise.add_bias(bias, out), elementwise.add_bias_twin),
    ):
        ((got, want),) = bench.run(call, twin, [out])
        assert_same(got, want)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 33), (70, 1536), (2, 14336)])
def test_silu_mul(bench: KernelBench, rows: int, width: int, biased: bool) -> None:
    out = bench.poisoned(rows, width, dtype=BF16)
    gate_up = bench.rng.standard_normal((rows, 2 * width)).astype(F32) * 3
    gate_up[:, 0] = -200  # silu underflows to zero, and to no NaN
    call = elementwise.silu_mul(bench.put(gate_up), out, bench.normal(2 * width) if biased else None)
    ((got, want),) = bench.run(call, elementwise.silu_mul_twin, [out])
    assert_close(got, want)


@pytest.mark.parametrize(("x_type", "out_type"), [(F32, BF16), (F32, F32), (BF16, BF16), (BF16, F32)])
@pytest.mark.parametrize(
    "shape", [(1, 4), (3, 5, 64), (2, 9, 80), (9, 516), (4, 576), (130, 2048), (2, 8192), (3, 16384)]
)
def test_rms_norm(bench: KernelBench, shape: tuple[int, ...], x_type: Any, out_type: Any) -> None:
    out = bench.poisoned(*shape, dtype=out_type)
    call = rms_norm.rms_norm(bench.normal(*shape, dtype=x_type, scale=3), bench.normal(shape[-1]), 1e-5, out)
    ((got, want),) = bench.run(call, rms_norm.rms_norm_twin, [out])
    assert_close(got, want)


def test_rms_norm_in_place(bench: KernelBench) -> None:
    x = bench.normal(5, 3, 128)
    call = rms_norm.rms_norm(x, bench.normal(128), 1e-6, x)
    ((got, want),) = bench.run(call, rms_norm.rms_norm_twin, [x])
    assert_close(got, want)


class Heads:
    """A layer's cache and the rows that go into it."""

    def __init__(self, bench: KernelBench, kv: int, e: int, tokens: int, slots: list[int]) -> None:
        rng, self.rows = bench.rng, len(slots)
        table = rng.permutation(12).astype(np.int32).reshape(3, 4)
        self.cache = bench.poisoned(12, 3, 2, kv, tokens, e, dtype=BF16)
        # No two rows at one place: they would race.
        positions = rng.permutation(4 * tokens)[: self.rows].astype(np.int32)
        self.step: Any = SimpleNamespace(
            positions=bench.put(positions), row_slot=bench.ints(slots), block_table=bench.put(table)
        )
        angle = rng.uniform(0, 6, (4 * tokens, e // 2))
        self.rope = Rope(bench.put(np.cos(angle).astype(F32)), bench.put(np.sin(angle).astype(F32)))


SHAPES = [
    (32, 8, 64, 32, [1]),
    (9, 3, 64, 16, [2, 0, -1]),
    (3, 1, 80, 16, [0, -1]),
    (4, 2, 96, 64, [-1]),
    (16, 8, 128, 32, [0, 1, 2] * 13),
    (2, 1, 256, 16, [1, 2]),
    (2, 2, 8, 16, [1, -1, 2]),
]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("h", "kv", "e", "tokens", "slots"), SHAPES)
def test_qkv_finish(
    bench: KernelBench, h: int, kv: int, e: int, tokens: int, slots: list[int], biased: bool, normed: bool
) -> None:
    """A padding row leaves no trace in the cache, and no other place of the cache changes."""
    s = Heads(bench, kv, e, tokens, slots)
    width = (h + 2 * kv) * e
    q = bench.poisoned(s.rows, h, e, dtype=BF16)
    call = heads.qkv_finish(
        bench.normal(s.rows, width),
        bench.normal(width) if biased else None,
        bench.normal(e) if normed else None,
        bench.normal(e) if normed else None,
        1e-6,
        s.rope,
        HeadShape(h, kv, e, 1),
        s.step,
        s.cache,
        q,
    )
    for got, want in bench.run(call, heads.qkv_finish_twin, [q, s.cache]):
        assert_close(got, want)


@pytest.mark.parametrize(("h", "kv", "e", "tokens", "slots"), SHAPES)
def test_parts_of_qkv_finish(bench: KernelBench, h: int, kv: int, e: int, tokens: int, slots: list[int]) -> None:
    s = Heads(bench, kv, e, tokens, slots)
    q, k, v = bench.poisoned(s.rows, h, e, dtype=BF16), bench.poisoned(s.rows, kv, e), bench.poisoned(s.rows, kv, e)
    call = heads.split_heads(bench.normal(s.rows, (h + 2 * kv) * e), q, k, v)
    for got, want in bench.run(call, heads.split_heads_twin, [q, k, v]):
        assert_same(got, want)
    ((got, want),) = bench.run(heads.rope(k, s.step.positions, s.rope), heads.rope_twin, [k])
    assert_close(got, want)
    ((got, want),) = bench.run(heads.kv_append(k, v, s.step, s.cache, 2), heads.kv_append_twin, [s.cache])
    assert_same(got, want)
