"""`CpuOps`: the primitives of `NumpyOps` replaced by compiled kernels, with the same contract of bitwise invariance."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from graphrt.kernels.array import Array, host_array
from graphrt.kernels.numpy_ops import BF16, NumpyOps, check_weight_dtype
from graphrt.kernels.ops import Linear, Rope
from graphrt.kernels.step_state import StepView

log = logging.getLogger(__name__)


def make_cpu_ops(threads: int | None = None) -> NumpyOps:
    """The fastest CPU backend that this installation has. `threads`: None for all cores that this process may use."""
    threads = threads or usable_cores()
    # OpenBLAS's own threads are slower than one for matrix-vector products on small machines, and one thread is what makes
    # NumPy's results repeat.
    threadpool_limits(1, "blas")
    if importlib.util.find_spec("numba") is None:
        log.warning("numba is not installed: the CPU backend runs on NumPy alone, several times slower")
        return NumpyOps()
    ops = CpuOps(threads)
    _warm_up()
    return ops


def _warm_up() -> None:
    """Compile every kernel before the first request rather than during it; says so when that takes long."""
    from graphrt.kernels.cpu.warm import warm_up

    notice = threading.Timer(
        1.0, log.warning, ["compiling the CPU kernels for this machine: only the first start takes this long"]
    )
    notice.daemon = True
    notice.start()
    try:
        warm_up()
    finally:
        notice.cancel()


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may keep busy: its affinity, cut by a container's quota (cgroup v2 `cpu.max`, v1 `cfs_quota`).

    A kernel thread beyond the quota would be stopped in the middle of a kernel while the others wait for it.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cores
    if not quota.isdigit() or not period.isdigit():  # "max" and -1: no quota
        return cores
    return max(1, min(cores, round(int(quota) / int(period))))


class CpuOps(NumpyOps):
    """bfloat16 weights stay packed in memory and are widened in registers: a decode step moves half the bytes of float32."""

    name = "numba"

    def __init__(self, threads: int) -> None:
        super().__init__()
        from graphrt.kernels.cpu import attention, elementwise, linear, sampling, team  # numba takes a second to import

        self._linear, self._elementwise, self._attention, self._sampling = linear, elementwise, attention, sampling
        team.set_threads(threads)

    def load_linear(self, parts: Sequence[NDArray[Any]], biases: Sequence[NDArray[Any]] | None = None) -> Linear:
        for part in parts:
            check_weight_dtype(part.dtype)
        # Parts of one type are packed as they are; a mixture is widened.
        keep = BF16 if all(p.dtype == BF16 for p in parts) else np.dtype(np.float32)
        whole = parts[0] if len(parts) == 1 else np.concatenate([p.astype(keep, copy=False) for p in parts])
        packed = self._linear.pack_linear(np.ascontiguousarray(whole, keep))
        return Linear(packed.n, packed.k, packed, self._bias(biases))

    def weight_bytes(self, n: int, k: int, dtype: np.dtype[Any]) -> int:
        return -(-n // 32) * 32 * k * (2 if dtype == BF16 else 4)

    def load_table(self, table: NDArray[Any]) -> Array:
        check_weight_dtype(table.dtype)
        return host_array(table.astype(np.float32) if table.dtype == np.float16 else np.asarray(table))

    def embed(self, tokens: Array, table: Array, out: Array) -> None:
        rows = table.np.view(np.uint16) if table.dtype == BF16 else table.np
        self._elementwise.embed(tokens.np, rows, out.np)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        width = x.shape[-1]
        self._elementwise.rms_norm(x.np.reshape(-1, width), weight.np, eps, out.np.reshape(-1, width))

    def linear(self, x: Array, w: Linear, out: Array, accumulate: bool = False) -> None:
        rows = x.shape[0]
        bias = None if w.bias is None else w.bias.np
        self._linear.linear(x.np.reshape(rows, w.k), w.data, bias, out.np.reshape(rows, w.n), accumulate)

    def rope(self, x: Array, positions: Array, rope: Rope) -> None:
        self._elementwise.rope(x.np, positions.np, rope.cos.np, rope.sin.np)

    def silu_mul(self, gate_up: Array, out: Array) -> None:
        self._elementwise.silu_mul(gate_up.np, out.np)

    def kv_append(self, k: Array, v: Array, b: StepView, cache: Array, layer: int) -> None:
        self._attention.kv_append(k.np, v.np, b.positions.np, b.row_slot.np, b.block_table.np, cache.np, layer)

    def paged_attention(self, q: Array, b: StepView, cache: Array, layer: int, scale: float, out: Array) -> None:
        self._attention.attention(q.np, b.positions.np, b.row_slot.np, b.block_table.np, cache.np, layer, scale, out.np)

    def noise(self, seed: int, position: int, token_ids: NDArray[Any], vocab: int) -> NDArray[np.float32]:
        return self._sampling.gumbel_noise(seed, position, vocab)[token_ids]
