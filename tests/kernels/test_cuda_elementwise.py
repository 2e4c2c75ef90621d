"""The twins of elementwise kernels beside `NumpyOps`: the two descriptions of an operation agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_bench import BF16, KernelBench, assert_close

from graphrt.kernels.array import Array, host_array, host_empty
from graphrt.kernels.cuda import elementwise, heads, rms_norm
from graphrt.kernels.cuda.fake_driver import FakeDriver
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, Rope

EPS = 1e-5


@pytest.fixture
def bench() -> KernelBench:
    return KernelBench(FakeDriver())


def on_host(bench: KernelBench, array: Array, wide: bool = True) -> Array:
    values = bench.driver.download(array)
    return host_array(values.astype(np.float32) if wide and values.dtype == BF16 else values)


def test_elementwise(bench: KernelBench) -> None:
    ops, d = NumpyOps(), bench.driver
    table, tokens, rows = bench.normal(20, 36, dtype=BF16), bench.ints([3, 19, 0, 7]), bench.ints([2, -1, 0])
    x, picked, hidden = bench.poisoned(4, 36), bench.poisoned(3, 36), bench.poisoned(4, 18, dtype=BF16)
    d.launch(elementwise.embed(tokens, table, x))
    d.launch(elementwise.gather_rows(x, rows, picked))
    d.launch(elementwise.silu_mul(x, hidden))
    d.launch(elementwise.add(x, x))
    want, want_picked, want_hidden = host_empty((4, 36)), host_empty((3, 36)), host_empty((4, 18))
    ops.embed(on_host(bench, tokens), on_host(bench, table, wide=False), want)
    ops.gather_rows(want, on_host(bench, rows), want_picked)
    ops.silu_mul(want, want_hidden)
    ops.add(want, want)
    np.testing.assert_array_equal(d.download(x), want.np)
    np.testing.assert_array_equal(d.download(picked), want_picked.np)
    assert_close(d.download(hidden), want_hidden.np)


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 80)])
def test_rms_norm(bench: KernelBench, shape: tuple[int, ...]) -> None:
    x, weight, out = bench.normal(*shape), bench.normal(shape[-1]), bench.poisoned(*shape, dtype=BF16)
    want = host_empty(shape)
    NumpyOps().rms_norm(on_host(bench, x), on_host(bench, weight), EPS, want)
    bench.driver.launch(rms_norm.rms_norm(x, weight, EPS, out))
    assert_close(bench.driver.download(out), want.np)


class Projection(NumpyOps):
    """Takes the product from outside, so that only what follows it is compared."""

    def __init__(self, qkv: Array) -> None:
        super().__init__()
        self.qkv = qkv

    def linear(self, x: Array, w: Linear, out: Array, accumulate: bool = False) -> None:
        out.np[:] = self.qkv.np


@pytest.mark.parametrize("normed", [False, True])
def test_qkv_finish_is_the_default_body(bench: KernelBench, normed: bool) -> None:
    h, kv, e, slots = 4, 2, 16, [1, -1, 0]
    rows, width = len(slots), (h + 2 * kv) * e
    step: Any = SimpleNamespace(
        positions=bench.ints([5, 0, 30]), row_slot=bench.ints(slots), block_table=bench.ints([[3, 1], [2, 0]])
    )
    angle = bench.rng.uniform(0, 6, (32, e // 2)).astype(np.float32)
    rope = Rope(bench.put(np.cos(angle)), bench.put(np.sin(angle)))
    qkv, q, cache = bench.normal(rows, width), bench.poisoned(rows, h, e, dtype=BF16), bench.normal(4, 2, 2, kv, 16, e)
    norms = (bench.normal(e), bench.normal(e)) if normed else (None, None)
    small = bench.put(bench.driver.download(cache).astype(BF16))
    bench.driver.launch(heads.qkv_finish(qkv, None, *norms, EPS, rope, HeadShape(h, kv, e, 1), step, small, q))

    ops = Projection(on_host(bench, qkv))
    host: Any = SimpleNamespace(**{name: on_host(bench, a) for name, a in vars(step).items()})
    want_q, want_cache, x = host_empty((rows, h, e)), on_host(bench, cache), host_array(np.zeros((rows, 8), np.float32))
    ops.norm_qkv_rope_append(
        x,
        AttentionWeights(
            host_array(np.ones(8, np.float32)),
            Linear(width, 8, None, None),
            *(None if n is None else on_host(bench, n) for n in norms),
        ),
        EPS,
        Rope(on_host(bench, rope.cos), on_host(bench, rope.sin)),
        HeadShape(h, kv, e, 1),
        host,
        want_cache,
        want_q,
    )
    assert_close(bench.driver.download(q), want_q.np)
    assert_close(bench.driver.download(small), want_cache.np)


def test_what_the_kernels_do_not_take_is_refused(bench: KernelBench) -> None:
    with pytest.raises(ValueError, match="over 30 values: must be a multiple of 4"):
        rms_norm.rms_norm_spec(30, False, True)
    with pytest.raises(ValueError, match="heads of 12 values"):
        heads.heads_spec("rope", 12)
    x = bench.normal(4, 8)
    with pytest.raises(ValueError, match="must be contiguous"):
        elementwise.add(x[:, :4], bench.normal(4, 4))
    with pytest.raises(TypeError, match="hidden units of type float32"):
        elementwise.silu_mul(x, bench.normal(4, 4))
