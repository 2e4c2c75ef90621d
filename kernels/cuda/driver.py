"""What the backend asks of a device: memory, launches, capture. One implementation drives a GPU, the other runs every kernel's twin.

The one clever thing: a launch is a value. A `KernelCall` names the kernel, its shape and its arguments as arrays, so the same call is
launched on a stream, recorded into a graph, counted, printed, or run by its twin on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphrt.errors import DeviceError
from graphrt.kernels.array import Array
from graphrt.kernels.cuda.jit import KernelSpec, Progress

Dim = tuple[int, int, int]
Arg = Array | np.generic | None
Twin = Callable[["KernelCall", list[Any]], None]  # the call, and its arguments as NumPy arrays over device memory


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch. args: an Array passes its address, None a null pointer, a NumPy scalar itself. smem: dynamic shared memory, bytes.

    cluster: blocks of a thread block cluster along x. pdl: the grid may start before its predecessor ends; the kernel waits by itself.
    """

    spec: KernelSpec
    grid: Dim
    block: Dim
    args: tuple[Arg, ...]
    smem: int = 0
    cluster: int = 1
    pdl: bool = True


class Graph(Protocol):
    """A captured sequence of launches."""

    nodes: int
    plain_edges: int
    programmatic_edges: int

    def launch(self) -> None:
        """Queue one replay; returns at once on a GPU. Replays run in order."""

    def dot(self) -> str:
        """The graph in Graphviz's language."""


class Driver(Protocol):
    """One device."""

    name: str
    arch: str  # what kernels are compiled for, such as sm_90a
    sm_count: int
    smem_per_block: int  # bytes a block may take when it asks
    eager_launches: int  # kernels and products launched outside of captures
    allocations: int  # so far

    def alloc(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Zeroed device memory. DeviceError when there is not enough."""

    def alloc_mapped(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Zeroed host memory that kernels read and write too: `host` is the NumPy view, `ptr` the device's address."""

    def upload(self, dst: Array, src: NDArray[Any]) -> None:
        """Copy to the device and wait. For start-up and tests."""

    def download(self, src: Array) -> NDArray[Any]:
        """Copy from the device, after all work queued so far. For start-up and tests."""

    def launch(self, call: KernelCall) -> None:
        """Launch on the stream, or record into the open capture. DeviceError names the kernel and its shape."""

    def matmul(self, x: Array, w: Array, out: Array, accumulate: bool) -> None:
        """Library product: out[R, n] float32 (+)= x[R, k] bf16 · w[n, k]ᵀ bf16. Rows may be strided."""

    def prepare(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Compile in parallel and load."""

    def capture(self, record: Callable[[], None]) -> Graph:
        """Run `record`, whose launches become a graph instead of running."""

    def synchronize(self) -> None:
        """Wait for all queued work. DeviceError when any of it failed."""

    def poll(self) -> None:
        """Called by whoever waits for a result: DeviceError when queued work has failed. Does not wait."""

    def free_memory(self) -> int:
        """Bytes of device memory that are not taken."""


SMEM_OPT_IN = 48 * 1024  # bytes of dynamic shared memory above which a kernel must be told that it may take more
MAX_THREADS = 1024
MAX_CLUSTER = 8  # portable


def check_call(driver: Driver, call: KernelCall) -> None:
    """DeviceError for a launch that no device of this size takes, before it becomes an error of the device."""
    threads, blocks = np.prod(call.block), np.prod(call.grid)
    why = ""
    if not 1 <= threads <= MAX_THREADS:
        why = f"{threads} threads a block: must be from 1 to {MAX_THREADS}"
    elif blocks < 1 or call.grid[0] >= 1 << 31 or max(call.grid[1:]) >= 1 << 16:
        why = "the grid is empty or too large"
    elif call.smem > driver.smem_per_block:
        why = f"{call.smem} bytes of shared memory: {driver.name} has {driver.smem_per_block} a block"
    elif not 1 <= call.cluster <= MAX_CLUSTER or call.grid[0] % call.cluster:
        why = f"clusters of {call.cluster} blocks: must be from 1 to {MAX_CLUSTER} and divide the grid's width"
    elif bad := [type(a).__name__ for a in call.args if not (a is None or isinstance(a, Array | np.generic))]:
        why = f"arguments of type {', '.join(bad)}: must be an Array, a NumPy scalar or None"
    if why:
        raise DeviceError(f"launching {describe(call)}: {why}")


def describe(call: KernelCall) -> str:
    """Kernel and shape, for messages."""
    cluster = f", clusters of {call.cluster}" if call.cluster > 1 else ""
    return f"{call.spec} (grid {call.grid}, block {call.block}, {call.smem} bytes of shared memory{cluster})"
