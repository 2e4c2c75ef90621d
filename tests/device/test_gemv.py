"""Products with one or two rows beside their twin: fresh random inputs, poisoned outputs, odd sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from graphrt.kernels.array import Array
from graphrt.kernels.cuda import gemv
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.gemv_twin import gemv_twin
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Rope

BF16 = np.dtype(ml_dtypes.bfloat16)
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Step:
    """The parts of a StepView that the kernel reads."""

    positions: Array
    row_slot: Array
    block_table: Array


class Bench:
    """Arrays on the device and the same values on the host."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver, self.rng = driver, np.random.default_rng(seed)
        print(f"seed {seed}")
        self.counter = driver.alloc((1,), np.uint32)

    def put(self, values: np.ndarray[Any, Any]) -> Array:
        array = self.driver.alloc(values.shape, values.dtype)
        self.driver.upload(array, values)
        return array

    def normal(self, *shape: int, dtype: Any = np.float32, scale: float = 1.0) -> Array:
        return self.put((self.rng.standard_normal(shape, dtype=np.float32) * scale).astype(dtype))

    def linear(self, n: int, k: int, bias: bool) -> Linear:
        """Padding rows are poisoned, padding columns zero, as the loader leaves them."""
        padded = np.full((-(-n // 8) * 8, -(-k // 32) * 32), np.nan, np.float32)
        padded[:, k:] = 0
        padded[:n, :k] = self.rng.standard_normal((n, k), dtype=np.float32) * k**-0.5
        return Linear(n, k, self.put(padded.astype(BF16)), self.normal(n) if bias else None)

    def check(self, call: KernelCall, *written: Array) -> None:
        """Run the kernel and the twin from the same memory; what they write must agree, and repeat."""
        arrays = {id(a): a for a in call.args if isinstance(a, Array)}
        before = {key: self.driver.download(a).copy() for key, a in arrays.items()}
        self.driver.prepare([call.spec])
        results = []
        for _ in range(3):
            for a in written:
                self.driver.upload(a, before[id(a)])
            self.driver.launch(call)
            self.driver.synchronize()
            results.append([self.driver.download(a).copy() for a in written])
            assert self.driver.download(self.counter)[0] == 0
        host = [before[id(a)] if isinstance(a, Array) else a for a in call.args]
        gemv_twin(call, host)
        for i, a in enumerate(written):
            close(results[0][i], before[id(a)])
            for again in results[1:]:
                assert again[i].tobytes() == results[0][i].tobytes()


def close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    """|a - b| ≤ 2^-7·|b| + 2^-8·RMS of b's row."""
    a, b = (v.astype(np.float64).reshape(-1, v.shape[-1]) for v in (got, want))
    rms = np.sqrt(np.nanmean(np.where(np.isnan(b), 0, b) ** 2, axis=-1, keepdims=True))
    same = np.isnan(a) == np.isnan(b)
    assert same.all(), f"NaN where the twin has none, or the reverse, at {np.argwhere(~same)[:4].tolist()}"
    wrong = np.abs(a - b) > 2**-7 * np.abs(b) + 2**-8 * rms
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0].tolist()}"


SIZES = [(2048, 2048), (24, 32), (40, 240), (576, 1536), (1000, 8192), (4096, 1096)]


@pytest.fixture
def bench(driver: Driver) -> Bench:
    return Bench(driver, int(np.random.SeedSequence().generate_state(1)[0]))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_residual(bench: Bench, rows: int, n: int, k: int) -> None:
    w, x = bench.linear(n, k, bias=k == 240), bench.normal(rows, n)
    bench.check(gemv.gemv_residual(bench.driver, bench.counter, bench.normal(rows, k, dtype=BF16), w, x), x)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("f", "k"), [(8192, 2048), (32, 32), (1536, 576), (700, 240)])
def test_norm_gate_up_silu(bench: Bench, rows: int, f: int, k: int) -> None:
    w = MlpWeights(bench.normal(k), bench.linear(2 * f, k, bias=f == 32))
    out = bench.put(np.full((rows, f), np.nan, BF16))
    bench.check(
        gemv.gemv_norm_gate_up_silu(bench.driver, bench.counter, bench.normal(rows, k, scale=3), w, EPS, out), out
    )


@pytest.mark.parametrize(("picked", "total"), [([0], 1), ([3, 1], 4), ([-1, 0], 1), ([-1], 2)])
@pytest.mark.parametrize(("v", "k"), [(4096, 2048), (1003, 576), (33, 64)])
def test_norm_head(bench: Bench, picked: list[int], total: int, v: int, k: int) -> None:
    out = bench.put(np.full((len(picked), v), np.nan, np.float32))
    rows, head = bench.put(np.array(picked, np.int32)), bench.linear(v, k, bias=v == 33)
    x = bench.normal(total, k)
    bench.check(gemv.gemv_norm_head(bench.driver, bench.counter, x, rows, bench.normal(k), EPS, head, out), out)


@pytest.mark.parametrize("rows", [1, 2])
def test_norm_linear(bench: Bench, rows: int) -> None:
    out = bench.put(np.full((rows, 960), np.nan, np.float32))
    w = bench.linear(960, 576, bias=False)
    bench.check(
        gemv.gemv_norm_linear(bench.driver, bench.counter, bench.normal(rows, 576), bench.normal(576), EPS, w, out), out
    )


@pytest.mark.parametrize(
    ("heads", "kv", "e", "d", "slots", "tokens"),
    [
        (32, 8, 64, 2048, [1], 32),
        (9, 3, 64, 576, [2, 0], 16),
        (3, 1, 80, 240, [0, -1], 16),
        (4, 2, 96, 384, [-1], 64),
        (8, 2, 128, 1024, [1, 2], 32),
    ],
)
def test_norm_qkv_rope_append(bench: Bench, heads: int, kv: int, e: int, d: int, slots: list[int], tokens: int) -> None:
    """A padding row leaves no trace in the cache, and no other place of the cache changes."""
    rng, rows = bench.rng, len(slots)
    table = rng.permutation(3 * 4).astype(np.int32).reshape(3, 4)
    positions = rng.integers(0, 4 * tokens, rows).astype(np.int32)
    cache = bench.put(np.full((12, 3, 2, kv, tokens, e), np.nan, BF16))
    angle = rng.uniform(0, 6, (4 * tokens, e // 2))
    rope = Rope(bench.put(np.cos(angle).astype(np.float32)), bench.put(np.sin(angle).astype(np.float32)))
    step: Any = Step(bench.put(positions), bench.put(np.array(slots, np.int32)), bench.put(table))
    w = AttentionWeights(bench.normal(d), bench.linear((heads + 2 * kv) * e, d, bias=e == 80), None, None)
    q = bench.put(np.full((rows, heads, e), np.nan, BF16))
    x = bench.normal(rows, d)
    shape = HeadShape(heads, kv, e, 1)
    call = gemv.gemv_norm_qkv_rope_append(bench.driver, bench.counter, x, w, EPS, rope, shape, step, cache, q)
    bench.check(call, q, cache)
