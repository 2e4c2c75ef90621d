"""`Ops`: everything that a step may do. Primitives are abstract; fused operations have a default body made of primitives.

A fused operation sits at the grain at which one kernel pays on a GPU. Its default body *is* its twin: a backend may override it with a
kernel, and the test of that kernel compares it with this body. Model code calls operations and slices arrays, and never asks which backend
it runs on. Shapes: R rows, S samples, D hidden size, H query heads, K key/value heads, E head size, F feed-forward size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphrt.kernels.array import Array
from graphrt.kernels.comm import Communicator
from graphrt.kernels.step_state import StepView


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [n, k] in the backend's own layout (`data`), and its bias [n] float32 or None."""

    n: int
    k: int
    data: Any
    bias: Array | None


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosines and sines, both [positions, E/2] float32, already scaled by the attention factor."""

    cos: Array
    sin: Array


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """norm [D]; qkv [(H + 2K)·E, D], rows in the order q, k, v; q_norm and k_norm [E] where the model has them."""

    norm: Array
    qkv: Linear
    q_norm: Array | None
    k_norm: Array | None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """norm [D]; gate_up [2F, D], gate rows first."""

    norm: Array
    gate_up: Linear


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one attention layer and where its keys lie: `layer` in the cache [blocks, layers, 2, K, block_tokens, E]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer: int


class Ops(ABC):
    """One backend. Outputs are written to `out`; nothing is allocated but from the step's arena."""

    kv_dtype = "float32"  # of the caches' elements

    # -- memory and weights -------------------------------------------------------------------------------------------

    @abstractmethod
    def alloc(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """A zeroed static buffer; lives as long as the returned array. For start-up, never inside a step."""

    def alloc_mapped(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Like `alloc`, but memory that the host and the steps both read and write: `Array.np` works on it."""
        return self.alloc(shape, dtype)

    @abstractmethod
    def empty(self, *shape: int) -> Array:
        """A float32 temporary from the arena, valid until the step or the enclosing `frame` ends."""

    def activation(self, *shape: int) -> Array:
        """A temporary like `empty`, in the type that products take: queries, attention outputs, hidden units, normed rows."""
        return self.empty(*shape)

    @abstractmethod
    def frame(self) -> AbstractContextManager[None]:
        """Temporaries taken inside are given back at its end."""

    @abstractmethod
    def load_linear(self, parts: Sequence[NDArray[Any]], biases: Sequence[NDArray[Any]] | None = None) -> Linear:
        """Weights [n_i, k] stacked along n, in the backend's layout. float32 or bfloat16; float16 is widened."""

    @abstractmethod
    def load_table(self, table: NDArray[Any]) -> Array:
        """An embedding table [V, D], rows gathered by `embed`."""

    @abstractmethod
    def load_vector(self, vector: NDArray[Any]) -> Array:
        """A float32 copy of a small tensor, of any shape."""

    @abstractmethod
    def weight_bytes(self, n: int, k: int, dtype: np.dtype[Any]) -> int:
        """Bytes that a weight [n, k] stored as `dtype` takes once loaded."""

    def table_bytes(self, n: int, k: int, tied: bool) -> int:
        """Bytes that a table [n, k] takes beside the file that it is mapped from. tied: it is loaded as a weight as well."""
        return 0

    # -- the ends of a step -------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self, b: StepView) -> None:
        """Pull the step's delta record, apply its patches, and fill tokens, positions, row_slot and sample_rows."""

    @abstractmethod
    def sample(self, logits: Array, b: StepView) -> None:
        """next_tokens[i] = the sample of logits[i] [V] by its slot's parameters; untouched where sample_rows[i] is PAD."""

    @abstractmethod
    def commit_step(self, b: StepView) -> None:
        """Write the sampled tokens to their slots and to the token ring, step number last."""

    # -- primitives ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def embed(self, tokens: Array, table: Array, out: Array) -> None:
        """out[r] = table[tokens[r]], widened to float32. [R] int32, [V, D] -> [R, D]."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out = x / sqrt(mean(x²) + eps) · weight along the last axis. [..., D]; `out` may be `x`."""

    @abstractmethod
    def linear(self, x: Array, w: Linear, out: Array, accumulate: bool = False) -> None:
        """out[r] = w · x[r] + bias, or added to out[r]. [R, k] -> [R, n]. A row's result does not depend on the others."""

    @abstractmethod
    def rope(self, x: Array, positions: Array, rope: Rope) -> None:
        """Rotate [R, heads, E] in place, first half against second half (arXiv 2104.09864, in the "rotate half" layout)."""

    @abstractmethod
    def silu_mul(self, gate_up: Array, out: Array) -> None:
        """out = silu(gate) · up. [R, 2F] -> [R, F]."""

    @abstractmethod
    def kv_append(self, k: Array, v: Array, b: StepView, cache: Array, layer: int) -> None:
        """Store k, v [R, K, E] at each row's position in its slot's blocks. Padding rows write nowhere."""

    @abstractmethod
    def paged_attention(self, q: Array, b: StepView, cache: Array, layer: int, scale: float, out: Array) -> None:
        """Each row attends to positions 0..own of its slot. [R, H, E] -> [R, H, E]; zeros for padding rows."""

    @abstractmethod
    def gather_rows(self, x: Array, rows: Array, out: Array) -> None:
        """out[i] = x[rows[i]], zeros where rows[i] is PAD. [R, D], [S] -> [S, D]."""

    @abstractmethod
    def split_heads(self, qkv: Array, q: Array, k: Array, v: Array) -> None:
        """Copy [R, H + 2K, E] apart into q [R, H, E], k and v [R, K, E]."""

    @abstractmethod
    def add(self, x: Array, out: Array) -> None:
        """out += x, elementwise."""

    # -- fused --------------------------------------------------------------------------------------------------------

    def norm_qkv_rope_append(
        self,
        x: Array,
        w: AttentionWeights,
        eps: float,
        rope: Rope,
        heads: HeadShape,
        b: StepView,
        cache: Array,
        out: Array,
    ) -> None:
        """Norm, project, normalise heads where the model does, rotate, append k and v to the cache. [R, D] -> q [R, H, E]."""
        kh, e = heads.num_kv_heads, heads.head_dim
        rows = x.shape[0]
        with self.frame():
            normed = self.activation(rows, w.qkv.k)
            qkv = self.empty(rows, w.qkv.n)
            k, v = self.empty(rows, kh, e), self.empty(rows, kh, e)
            self.rms_norm(x, w.norm, eps, normed)
            self.linear(normed, w.qkv, qkv)
            self.split_heads(qkv, out, k, v)
            if w.q_norm is not None and w.k_norm is not None:
                self.rms_norm(out, w.q_norm, eps, out)
                self.rms_norm(k, w.k_norm, eps, k)
            self.rope(out, b.positions, rope)
            self.rope(k, b.positions, rope)
            self.kv_append(k, v, b, cache, heads.layer)

    def linear_residual(self, x: Array, w: Linear, residual: Array, comm: Communicator) -> None:
        """residual += sum over ranks of (w · x), bias once. [R, k] -> [R, n]. Row-parallel: x and w are this rank's slices."""
        if comm.size == 1:
            self.linear(x, w, residual, accumulate=True)
            return
        with self.frame():
            part = self.empty(x.shape[0], w.n)
            self.linear(x, w, part)
            comm.all_reduce(part)
            self.add(part, residual)

    def norm_gate_up_silu(self, x: Array, w: MlpWeights, eps: float, out: Array) -> None:
        """silu(gate(norm(x))) · up(norm(x)). [R, D] -> [R, F]."""
        rows = x.shape[0]
        with self.frame():
            normed = self.activation(rows, w.gate_up.k)
            gate_up = self.empty(rows, w.gate_up.n)
            self.rms_norm(x, w.norm, eps, normed)
            self.linear(normed, w.gate_up, gate_up)
            self.silu_mul(gate_up, out)

    def norm_head(self, x: Array, rows: Array, norm: Array, eps: float, head: Linear, out: Array) -> None:
        """Logits of the sampled rows. [R, D], [S] -> [S, V]."""
        with self.frame():
            picked, normed = self.empty(rows.shape[0], head.k), self.activation(rows.shape[0], head.k)
            self.gather_rows(x, rows, picked)
            self.rms_norm(picked, norm, eps, normed)
            self.linear(normed, head, out)
