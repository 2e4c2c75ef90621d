"""A model's products on a device as the launches of a decode step, without attention: what `kernel_gemm` times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda import gemm64
from graphrt.kernels.cuda.driver import KernelCall
from graphrt.kernels.cuda.fill import fill_bell
from graphrt.kernels.cuda.gemm64_tuning import Gemm64Tuning
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Rope
from graphrt.perf.device_time import graph_us
from graphrt.perf.kernel_gemv import Shape

BF16 = np.dtype(ml_dtypes.bfloat16)
PRODUCTS = ("gate_up", "down", "head", "qkv", "o")  # the largest first
Tunes = dict[str, Gemm64Tuning]


@dataclass(frozen=True, slots=True)
class Step:
    """The parts of a StepView that the kernels read."""

    positions: Array
    row_slot: Array
    block_table: Array


class Weights:
    """A model's products, filled on the device; shared by the chains of all batch sizes."""

    def __init__(self, driver: Any, s: Shape) -> None:
        self.driver, self.s, self._seed = driver, s, 0
        layers = range(s.layers)
        self.norm = self._filled((s.hidden,), np.float32, 1.0)
        self.qkv = [self._linear((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden) for _ in layers]
        self.o = [self._linear(s.hidden, s.heads * s.head_dim) for _ in layers]
        self.gate_up = [self._linear(2 * s.ffn, s.hidden) for _ in layers]
        self.down = [self._linear(s.hidden, s.ffn) for _ in layers]
        self.head = [self._linear(s.vocab, s.hidden)]

    def _filled(self, shape: tuple[int, ...], dtype: Any, std: float) -> Array:
        self._seed += 1
        out: Array = self.driver.alloc(shape, dtype)
        self.driver.launch(fill_bell(self.driver, out, self._seed, std))
        return out

    def _linear(self, n: int, k: int) -> Linear:
        return Linear(n, k, self._filled((n, k), BF16, 0.1 * k**-0.5), None)  # small, so that x stays what it is

    def of(self, product: str) -> list[Linear]:
        """One weight a layer; one in all for the head."""
        weights: list[Linear] = getattr(self, product)
        return weights

    def nbytes(self, product: str) -> int:
        return sum(w.data.nbytes for w in self.of(product))


class Chain:
    """All products of a step with `rows` rows."""

    def __init__(self, weights: Weights, rows: int) -> None:
        self.w, self.rows, self.driver = weights, rows, weights.driver
        d, s, f32 = self.driver, weights.s, np.float32
        self.x = d.alloc((rows, s.hidden), f32)
        d.launch(fill_bell(d, self.x, 99, 1.0))
        self.q = d.alloc((rows, s.heads, s.head_dim), BF16)
        self.hidden, self.logits = d.alloc((rows, s.ffn), BF16), d.alloc((rows, s.vocab), f32)
        slots = np.arange(rows, dtype=np.int32)
        self.picked = d.alloc((rows,), np.int32)
        d.upload(self.picked, slots)
        self.rope = Rope(d.alloc((64, s.head_dim // 2), f32), d.alloc((64, s.head_dim // 2), f32))
        self.cache = d.alloc((rows, s.layers, 2, s.kv_heads, 32, s.head_dim), BF16)
        table = d.alloc((rows, 1), np.int32)
        d.upload(table, slots[:, None])
        self.step: Any = Step(d.alloc((rows,), np.int32), self.picked, table)

    def call(self, product: str, layer: int, t: Gemm64Tuning) -> list[KernelCall]:
        d, w, s, eps = self.driver, self.w, self.w.s, 1e-5
        weight = w.of(product)[layer]
        if product == "qkv":
            attention = AttentionWeights(w.norm, weight, None, None)
            shape = HeadShape(s.heads, s.kv_heads, s.head_dim, layer)
            return gemm64.gemm64_norm_qkv_rope_append(
                d, self.x, attention, eps, self.rope, shape, self.step, self.cache, self.q, tuning=t
            )
        if product == "gate_up":
            return gemm64.gemm64_norm_gate_up_silu(d, self.x, MlpWeights(w.norm, weight), eps, self.hidden, t)
        if product == "head":
            return gemm64.gemm64_norm_head(d, self.x, self.picked, w.norm, eps, weight, self.logits, t)
        return gemm64.gemm64_residual(d, self.q if product == "o" else self.hidden, weight, self.x, t)

    def calls(self, tunes: Tunes) -> list[KernelCall]:
        """The step's launches in order."""
        found = []
        for layer in range(self.w.s.layers):
            for product in ("qkv", "o", "gate_up", "down"):
                found += self.call(product, layer, tunes[product])
        return found + self.call("head", 0, tunes["head"])

    def only(self, product: str, tunes: Tunes) -> list[KernelCall]:
        """One product in all layers."""
        return [c for layer in range(len(self.w.of(product))) for c in self.call(product, layer, tunes[product])]

    def default(self, product: str, bulk: bool | None = None) -> Gemm64Tuning:
        """What the product gets where no cut is given; bulk: the kind of copies, None for the usual."""
        weight, e = self.w.of(product)[0], self.w.s.head_dim
        mode = {"qkv": gemm64.Mode.QKV, "gate_up": gemm64.Mode.GATE_UP, "head": gemm64.Mode.PLAIN}.get(product)
        if mode is None:
            return gemm64.tuning_of(self.driver, gemm64.Mode.RESIDUAL, False, self.rows, weight, bulk=bulk)
        return gemm64.tuning_of(self.driver, mode, True, self.rows, weight, e, bulk)

    def microseconds(self, calls: list[KernelCall], replays: int = 20, rounds: int = 7) -> float:
        """Median time of a replay."""
        self.driver.prepare({c.spec for c in calls})
        graph = self.driver.capture(lambda: [self.driver.launch(c) for c in calls])
        return statistics.median(graph_us(self.driver, graph, replays, rounds))
