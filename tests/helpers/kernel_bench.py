"""A kernel beside its twin: the same inputs, poisoned outputs, bits that repeat."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import Driver, KernelCall, Twin

BF16 = np.dtype(ml_dtypes.bfloat16)


class KernelBench:
    """Arrays on a device, filled from one random generator whose seed is printed."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.seed = int(np.random.SeedSequence().generate_state(1)[0])
        self.rng = np.random.default_rng(self.seed)
        print(f"seed {self.seed}")

    def put(self, values: NDArray[Any]) -> Array:
        array = self.driver.alloc(values.shape, values.dtype)
        self.driver.upload(array, np.ascontiguousarray(values))
        return array

    def normal(self, *shape: int, dtype: Any = np.float32, scale: float = 1.0) -> Array:
        return self.put((self.rng.standard_normal(shape, dtype=np.float32) * scale).astype(dtype))

    def poisoned(self, *shape: int, dtype: Any = np.float32) -> Array:
        return self.put(np.full(shape, np.nan, dtype))

    def ints(self, values: Any) -> Array:
        return self.put(np.asarray(values, np.int32))

    def run(self, call: KernelCall, twin: Twin, written: list[Array], repeats: int = 3) -> list[tuple[Any, Any]]:
        """(kernel's, twin's) values of each written array; AssertionError when repeats differ."""
        arrays = {id(a): a for a in call.args if isinstance(a, Array)}
        before = {key: self.driver.download(a).copy() for key, a in arrays.items()}
        self.driver.prepare([call.spec])
        first: list[NDArray[Any]] = []
        for _ in range(repeats):
            for a in written:
                self.driver.upload(a, before[id(a)])
            self.driver.launch(call)
            self.driver.synchronize()
            got = [self.driver.download(a).copy() for a in written]
            first = first or got
            assert all(a.tobytes() == b.tobytes() for a, b in zip(first, got, strict=True)), "a repeat differs"
        twin(call, [before[id(a)] if isinstance(a, Array) else a for a in call.args])
        return [(got, before[id(a)]) for got, a in zip(first, written, strict=True)]


def assert_close(got: NDArray[Any], want: NDArray[Any]) -> None:
    """|a - b| ≤ 2^-7·|b| + 2^-8·RMS of b's row, NaN exactly where the twin has it."""
    a, b = (v.astype(np.float64).reshape(-1, v.shape[-1]) for v in (got, want))
    rms = np.sqrt(np.mean(np.where(np.isnan(b), 0, b) ** 2, axis=-1, keepdims=True))
    same = np.isnan(a) == np.isnan(b)
    assert same.all(), f"NaN where the twin has none, or the reverse, at {np.argwhere(~same)[:4].tolist()}"
    wrong = np.abs(a - b) > 2**-7 * np.abs(b) + 2**-8 * rms
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0].tolist()}"


def assert_same(got: NDArray[Any], want: NDArray[Any]) -> None:
    """Equal bit by bit."""
    assert got.tobytes() == want.tobytes(), f"first at {np.argwhere(got != want)[:1].tolist()}"
