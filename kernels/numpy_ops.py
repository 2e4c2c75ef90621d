"""`NumpyOps`: every primitive in plain NumPy. The twin of all kernels, and the CPU backend where numba is missing.

Bitwise invariant by construction: matrix products are done row by row with one BLAS call of one shape, attention per row over exactly the
positions that the row sees. So no result depends on what else is in the batch or on how a prompt was cut. BLAS must run on one thread
(`CpuOps` and the tests see to it); that is also what is fast here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphrt.kernels import abi
from graphrt.kernels.arena import Arena
from graphrt.kernels.array import Array, host_array
from graphrt.kernels.numpy_step import NumpyStepEnds
from graphrt.kernels.ops import Linear, Rope
from graphrt.kernels.step_state import StepView

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def check_weight_dtype(dtype: np.dtype[Any]) -> None:
    """TypeError for an element type that no CPU backend loads."""
    if dtype not in (F32, BF16, np.dtype(np.float16)):
        raise TypeError(f"weights of type {dtype}: must be float32, float16 or bfloat16")


class NumpyOps(NumpyStepEnds):
    """See the module's docstring. Weights are widened to float32."""

    name = "numpy"

    def __init__(self) -> None:
        self.arena = Arena()

    # -- memory and weights -------------------------------------------------------------------------------------------

    def alloc(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return host_array(np.zeros(shape, dtype))

    def empty(self, *shape: int) -> Array:
        return self.arena.take(shape)

    def frame(self) -> AbstractContextManager[None]:
        return self.arena.frame()

    def load_linear(self, parts: Sequence[NDArray[Any]], biases: Sequence[NDArray[Any]] | None = None) -> Linear:
        for part in parts:
            check_weight_dtype(part.dtype)
        data = np.concatenate([p.astype(F32) for p in parts])
        return Linear(data.shape[0], data.shape[1], data, self._bias(biases))

    def _bias(self, biases: Sequence[NDArray[Any]] | None) -> Array | None:
        return None if biases is None else host_array(np.concatenate([b.astype(F32) for b in biases]))

    def load_table(self, table: NDArray[Any]) -> Array:
        check_weight_dtype(table.dtype)
        return host_array(np.asarray(table))

    def load_vector(self, vector: NDArray[Any]) -> Array:
        check_weight_dtype(vector.dtype)
        return host_array(vector.astype(F32))

    def weight_bytes(self, n: int, k: int, dtype: np.dtype[Any]) -> int:
        return n * k * 4

    # -- primitives ---------------------------------------------------------------------------------------------------

    def embed(self, tokens: Array, table: Array, out: Array) -> None:
        out.np[:] = table.np[tokens.np].astype(F32)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        xs = x.np
        mean = np.mean(np.square(xs), axis=-1, keepdims=True, dtype=F32)
        np.multiply(xs / np.sqrt(mean + F32.type(eps)), weight.np, out=out.np)

    def linear(self, x: Array, w: Linear, out: Array, accumulate: bool = False) -> None:
        rows = x.shape[0]
        for xr, yr in zip(x.np.reshape(rows, w.k), out.np.reshape(rows, w.n), strict=True):
            y = w.data @ xr
            if w.bias is not None:
                y += w.bias.np
            yr[:] = yr + y if accumulate else y

    def rope(self, x: Array, positions: Array, rope: Rope) -> None:
        cos, sin = rope.cos.np[positions.np][:, None], rope.sin.np[positions.np][:, None]
        half = x.shape[-1] // 2
        a, c = x.np[..., :half].copy(), x.np[..., half:].copy()
        x.np[..., :half] = a * cos - c * sin
        x.np[..., half:] = c * cos + a * sin

    def silu_mul(self, gate_up: Array, out: Array) -> None:
        f = out.shape[-1]
        gate, up = gate_up.np[:, :f], gate_up.np[:, f:]
        with np.errstate(over="ignore"):  # exp of a very negative gate: silu is then 0
            np.multiply(gate / (1 + np.exp(-gate)), up, out=out.np)

    def kv_append(self, k: Array, v: Array, b: StepView, cache: Array, layer: int) -> None:
        live = np.flatnonzero(b.row_slot.np != abi.PAD)
        block_tokens = cache.shape[4]
        position = b.positions.np[live]
        block = b.block_table.np[b.row_slot.np[live], position // block_tokens]
        cache.np[block, layer, 0, :, position % block_tokens] = k.np[live]
        cache.np[block, layer, 1, :, position % block_tokens] = v.np[live]

    def paged_attention(self, q: Array, b: StepView, cache: Array, layer: int, scale: float, out: Array) -> None:
        kv_heads, block_tokens, head_dim = cache.shape[3:]
        group = q.shape[1] // kv_heads
        for r, slot in enumerate(b.row_slot.np):
            if slot == abi.PAD:
                out.np[r] = 0
                continue
            n = int(b.positions.np[r]) + 1
            blocks = b.block_table.np[slot, : -(-n // block_tokens)]
            pages = cache.np[blocks, layer]  # [blocks, 2, K, block_tokens, E]
            kv = pages.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :n]
            for h in range(kv_heads):
                heads = slice(h * group, (h + 1) * group)
                scores = (q.np[r, heads] @ kv[0, h].T) * F32.type(scale)
                p = np.exp(scores - scores.max(axis=1, keepdims=True))
                out.np[r, heads] = (p @ kv[1, h]) / p.sum(axis=1, keepdims=True)

    def gather_rows(self, x: Array, rows: Array, out: Array) -> None:
        live = rows.np != abi.PAD
        out.np[~live] = 0
        out.np[live] = x.np[rows.np[live]]

    def split_heads(self, qkv: Array, q: Array, k: Array, v: Array) -> None:
        h, kh = q.shape[1], k.shape[1]
        parts = qkv.np.reshape(q.shape[0], h + 2 * kh, q.shape[2])
        q.np[:] = parts[:, :h]
        k.np[:] = parts[:, h : h + kh]
        v.np[:] = parts[:, h + kh :]

    def add(self, x: Array, out: Array) -> None:
        out.np[:] += x.np
