"""`CudaOps`: every operation of a step as launches on a device. Which kernel takes which shape is decided here and nowhere else.

Rows of a product: up to 2 stream the weights with `gemv`, up to 64 with `gemm64` on tensor cores, more (prefill) go to the library, between
kernels of our own. A shape that a fast path was not built for takes the library's way too; all of it is captured alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphrt.kernels.array import Array
from graphrt.kernels.comm import Communicator
from graphrt.kernels.cuda import attention, begin_step, elementwise, gemm64, gemv, heads, rms_norm, sample
from graphrt.kernels.cuda.arena import DeviceArena
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.dry_run import DryRun
from graphrt.kernels.cuda.loading import BF16, padded, upload_matrix, upload_vector
from graphrt.kernels.cuda.workspace import Workspaces
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Ops, Rope
from graphrt.kernels.step_state import StepView

COUNTERS = 32  # more than the launches that can overlap in time
LINE = 32  # words between two of them


class CudaOps(Ops):
    """One device. `Linear.data` is the padded weight [n', k'] bf16."""

    name = "cuda"
    kv_dtype = "bfloat16"

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.arena, self.workspaces = DeviceArena(driver), Workspaces(driver)
        self._counters = 0
        self._tables: list[tuple[NDArray[Any], Array]] = []  # tables as they were given, and where they lie

    # -- memory and weights -------------------------------------------------------------------------------------------

    def alloc(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return self.driver.alloc(shape, dtype)

    def alloc_mapped(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return self.driver.alloc_mapped(shape, dtype)

    def empty(self, *shape: int) -> Array:
        return self.arena.take(shape)

    def activation(self, *shape: int) -> Array:
        return self.arena.take(shape, BF16)

    def frame(self) -> AbstractContextManager[None]:
        return self.arena.frame()

    def load_linear(self, parts: Sequence[NDArray[Any]], biases: Sequence[NDArray[Any]] | None = None) -> Linear:
        n, k = sum(len(p) for p in parts), parts[0].shape[1]
        data = next((a for table, a in self._tables if len(parts) == 1 and table is parts[0]), None)
        if data is None or padded(n, k) != (n, k):  # a tied head is the embedding itself, unless it needs padding
            data = upload_matrix(self.driver, parts, padded(n, k))
        bias = None if biases is None else upload_vector(self.driver, np.concatenate(biases))
        return Linear(n, k, data, bias)

    def load_table(self, table: NDArray[Any]) -> Array:
        n, k = table.shape
        out = upload_matrix(self.driver, [table], (n, k))
        self._tables.append((table, out))
        return out

    def load_vector(self, vector: NDArray[Any]) -> Array:
        return upload_vector(self.driver, vector)

    def weight_bytes(self, n: int, k: int, dtype: np.dtype[Any]) -> int:
        rows, columns = padded(n, k)
        return rows * columns * BF16.itemsize

    def table_bytes(self, n: int, k: int, tied: bool) -> int:
        return 0 if tied and padded(n, k) == (n, k) else n * k * BF16.itemsize

    # -- before a capture ---------------------------------------------------------------------------------------------

    @contextmanager
    def dry_run(self) -> Iterator[DryRun]:
        """Steps inside launch nothing; what they would is in the result, and there is then as much memory as they need."""
        self.workspaces.begin_dry()
        with self.arena.dry(), self._instead(DryRun(self.driver)) as seen:
            yield seen
        self.workspaces.end_dry()

    @contextmanager
    def products_only(self) -> Iterator[DryRun]:
        """Steps inside launch one library product of each shape, on whatever the arena holds."""
        with self._instead(DryRun(self.driver, products=True)) as seen:
            yield seen

    @contextmanager
    def _instead(self, dry: DryRun) -> Iterator[DryRun]:
        real, self.driver = self.driver, dry
        try:
            yield dry
        finally:
            self.driver = real

    def _counter(self) -> Array:
        """A counter that none of the last launches uses."""
        self._counters = (self._counters + 1) % COUNTERS
        return self.workspaces.take("tickets", COUNTERS * LINE)[self._counters * LINE :][:1]

    def _launch(self, *calls: KernelCall) -> None:
        for call in calls:
            self.driver.launch(call)

    # -- the ends of a step -------------------------------------------------------------------------------------------

    def begin_step(self, b: StepView) -> None:
        self.arena.reset()
        self._counters = 0
        self._launch(begin_step.begin_step(b))

    def sample(self, logits: Array, b: StepView) -> None:
        """The last row to be sampled commits the step as well."""
        workspace = self.workspaces.take("sample", *sample.workspace_shape())
        self._launch(sample.sample(self.driver, logits, b, workspace))

    def commit_step(self, b: StepView) -> None:
        """`sample` did it."""

    # -- primitives ---------------------------------------------------------------------------------------------------

    def embed(self, tokens: Array, table: Array, out: Array) -> None:
        self._launch(elementwise.embed(tokens, table, out))

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        self._launch(rms_norm.rms_norm(x, weight, eps, out))

    def linear(self, x: Array, w: Linear, out: Array, accumulate: bool = False) -> None:
        self._product(x, w, out, accumulate)
        if w.bias is not None:
            self._launch(elementwise.add_bias(w.bias, out))

    def _product(self, x: Array, w: Linear, out: Array, accumulate: bool = False) -> None:
        self.driver.matmul(as_rows(x, w.k), w.data[: w.n, : w.k], out, accumulate)

    def rope(self, x: Array, positions: Array, rope: Rope) -> None:
        self._launch(heads.rope(x, positions, rope))

    def silu_mul(self, gate_up: Array, out: Array) -> None:
        self._launch(elementwise.silu_mul(gate_up, out))

    def kv_append(self, k: Array, v: Array, b: StepView, cache: Array, layer: int) -> None:
        self._launch(heads.kv_append(k, v, b, cache, layer))

    def gather_rows(self, x: Array, rows: Array, out: Array) -> None:
        self._launch(elementwise.gather_rows(x, rows, out))

    def split_heads(self, qkv: Array, q: Array, k: Array, v: Array) -> None:
        self._launch(heads.split_heads(qkv, q, k, v))

    def add(self, x: Array, out: Array) -> None:
        self._launch(elementwise.add(x, out))

    def paged_attention(self, q: Array, b: StepView, cache: Array, layer: int, scale: float, out: Array) -> None:
        rows, h, e = q.shape
        words = attention.workspace_words(b.kind, rows, h, cache.shape[3], e, self.driver.sm_count)
        workspace = self.workspaces.take("attention", words)
        self._launch(attention.paged_attention(self.driver, q, b, cache, layer, scale, out, workspace))

    # -- fused --------------------------------------------------------------------------------------------------------

    def norm_qkv_rope_append(
        self,
        x: Array,
        w: AttentionWeights,
        eps: float,
        rope: Rope,
        shape: HeadShape,
        b: StepView,
        cache: Array,
        out: Array,
    ) -> None:
        rows, d = x.shape[0], self.driver
        plain = w.q_norm is None  # what normalises heads does so in a kernel of its own
        if plain and gemv.fits(gemv.Mode.QKV, rows, w.qkv, shape.head_dim):
            self._launch(gemv.gemv_norm_qkv_rope_append(d, self._counter(), x, w, eps, rope, shape, b, cache, out))
            return
        if plain and gemm64.fits(d, gemm64.Mode.QKV, True, rows, w.qkv, shape.head_dim):
            self._launch(*gemm64.gemm64_norm_qkv_rope_append(d, x, w, eps, rope, shape, b, cache, out))
            return
        with self.frame():
            qkv, bias = self.empty(rows, w.qkv.n), w.qkv.bias
            if gemv.fits(gemv.Mode.PLAIN, rows, w.qkv):
                self._launch(gemv.gemv_norm_linear(d, self._counter(), x, w.norm, eps, w.qkv, qkv))
                bias = None  # that was added
            elif gemm64.fits(d, gemm64.Mode.PLAIN, True, rows, w.qkv):
                self._launch(*gemm64.gemm64_norm_qkv_rope_append(d, x, w, eps, rope, shape, b, cache, out, qkv))
                return
            else:
                self._norm_product(x, w.norm, eps, w.qkv, qkv)
            self._launch(heads.qkv_finish(qkv, bias, w.q_norm, w.k_norm, eps, rope, shape, b, cache, out))

    def linear_residual(self, x: Array, w: Linear, residual: Array, comm: Communicator) -> None:
        rows, d = x.shape[0], self.driver
        if comm.size == 1 and gemv.fits(gemv.Mode.RESIDUAL, rows, w):
            self._launch(gemv.gemv_residual(d, self._counter(), x, w, residual))
        elif comm.size == 1 and gemm64.fits(d, gemm64.Mode.RESIDUAL, False, rows, w):
            self._launch(*gemm64.gemm64_residual(d, x, w, residual))
        else:
            super().linear_residual(x, w, residual, comm)

    def norm_gate_up_silu(self, x: Array, w: MlpWeights, eps: float, out: Array) -> None:
        rows, d = x.shape[0], self.driver
        if gemv.fits(gemv.Mode.GATE_UP, rows, w.gate_up):
            self._launch(gemv.gemv_norm_gate_up_silu(d, self._counter(), x, w, eps, out))
        elif gemm64.fits(d, gemm64.Mode.GATE_UP, True, rows, w.gate_up):
            self._launch(*gemm64.gemm64_norm_gate_up_silu(d, x, w, eps, out))
        else:
            with self.frame():
                gate_up = self.empty(rows, w.gate_up.n)
                self._norm_product(x, w.norm, eps, w.gate_up, gate_up)
                self._launch(elementwise.silu_mul(gate_up, out, w.gate_up.bias))

    def norm_head(self, x: Array, rows: Array, norm: Array, eps: float, head: Linear, out: Array) -> None:
        samples, d = rows.shape[0], self.driver
        if gemv.fits(gemv.Mode.HEAD, samples, head):
            self._launch(gemv.gemv_norm_head(d, self._counter(), x, rows, norm, eps, head, out))
        elif gemm64.fits(d, gemm64.Mode.PLAIN, True, samples, head):
            self._launch(*gemm64.gemm64_norm_head(d, x, rows, norm, eps, head, out))
        else:
            super().norm_head(x, rows, norm, eps, head, out)

    def _norm_product(self, x: Array, norm: Array, eps: float, w: Linear, out: Array) -> None:
        """out = w · norm(x), without the bias: the kernel that follows adds it."""
        with self.frame():
            normed = self.activation(x.shape[0], w.k)
            self.rms_norm(x, norm, eps, normed)
            self._product(normed, w, out)


def as_rows(x: Array, k: int) -> Array:
    """The same contiguous memory as rows of k values."""
    size = x.dtype.itemsize
    return Array(x.ptr, (x.nbytes // size // k, k), x.dtype, (k * size, size), x.owner)
