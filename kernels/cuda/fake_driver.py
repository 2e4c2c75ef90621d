"""A device for machines without one: every launch runs its kernel's twin on host memory.

No mock: memory, launches, capture and replay are implemented, so a captured graph replays on the CPU. Replays are *late*, as on a GPU: a
graph that was launched runs only when somebody waits for it (`poll`, `synchronize`, a copy), so that a host which reads too early, or
edits memory that a queued replay still reads, is caught.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphrt.errors import DeviceError
from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import KernelCall, Twin, check_call, describe
from graphrt.kernels.cuda.fake_memory import FakeMemory
from graphrt.kernels.cuda.jit import KernelSpec, Progress


@dataclass(frozen=True, slots=True)
class Matmul:
    """A library product as a graph holds it."""

    x: Array
    w: Array
    out: Array
    accumulate: bool


Work = KernelCall | Matmul


class FakeGraph:
    """Launches in a line, as a stream's capture gives them."""

    def __init__(self, driver: FakeDriver, work: list[Work]) -> None:
        self._driver, self.work = driver, work
        self.nodes = len(work)
        # As on a device: a programmatic edge joins two kernels of which the later one asked for it.
        pairs = itertools.pairwise(work)
        self.programmatic_edges = sum(
            isinstance(a, KernelCall) and isinstance(b, KernelCall) and b.pdl for a, b in pairs
        )
        self.plain_edges = max(self.nodes - 1, 0) - self.programmatic_edges

    def launch(self) -> None:
        """Queue a replay."""
        self._driver.queue(self.work)

    def dot(self) -> str:
        """The line of launches."""
        names = [describe(w) if isinstance(w, KernelCall) else f"matmul {w.out.shape}" for w in self.work]
        nodes = [f'  n{i} [label="{name}"];' for i, name in enumerate(names)]
        edges = [f"  n{i} -> n{i + 1};" for i in range(self.nodes - 1)]
        return "\n".join(["digraph step {", *nodes, *edges, "}"])


class FakeDriver:
    """See the module's docstring. `memory`: bytes; `sm_count`: what grids are made for; `late`: whether replays wait to be waited for."""

    name = "fake"
    arch = "sm_90a"

    def __init__(
        self,
        *,
        memory: int = 1 << 31,
        sm_count: int = 12,
        smem_per_block: int = 232448,
        late: bool = True,
        twins: Mapping[str, Twin] | None = None,
    ) -> None:
        if twins is None:
            from graphrt.kernels.cuda.catalog import all_twins

            twins = all_twins()
        self.sm_count, self.smem_per_block, self.late = sm_count, smem_per_block, late
        self.memory = FakeMemory(memory)
        self.launches = 0  # kernels and products that ran
        self.allocations = self.eager_launches = 0
        self._twins = twins
        self._capture: list[Work] | None = None
        self._queue: deque[list[Work]] = deque()

    def alloc(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return self._alloc(shape, dtype, mapped=False)

    def alloc_mapped(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return self._alloc(shape, dtype, mapped=True)

    def _alloc(self, shape: tuple[int, ...], dtype: DTypeLike, mapped: bool) -> Array:
        if self._capture is not None:
            raise DeviceError("an allocation inside a capture")
        self.allocations += 1
        return self.memory.alloc(shape, dtype, mapped=mapped)

    def upload(self, dst: Array, src: NDArray[Any]) -> None:
        self.synchronize()
        view = self.memory.view(dst, "the target of an upload")
        if src.shape != view.shape or src.dtype != view.dtype:
            raise DeviceError(f"upload: {src.dtype} {src.shape} does not fit {dst.dtype} {dst.shape}")
        view[...] = src

    def download(self, src: Array) -> NDArray[Any]:
        self.synchronize()
        return self.memory.view(src, "the source of a download").copy()

    def launch(self, call: KernelCall) -> None:
        check_call(self, call)
        if call.spec.entry not in self._twins:
            raise DeviceError(f"kernel {call.spec} has no twin")
        self._do(call)

    def matmul(self, x: Array, w: Array, out: Array, accumulate: bool) -> None:
        if (x.shape[1], out.shape) != (w.shape[1], (x.shape[0], w.shape[0])):
            raise DeviceError(f"matmul: x {x.shape}, w {w.shape} and out {out.shape} do not fit together")
        self._do(Matmul(x, w, out, accumulate))

    def prepare(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        todo = sorted(set(specs))
        for done, spec in enumerate(todo, 1):
            if spec.entry not in self._twins:
                raise DeviceError(f"kernel {spec} has no twin")
            if progress is not None:
                progress(done, len(todo), spec)

    def capture(self, record: Callable[[], None]) -> FakeGraph:
        if self._capture is not None:
            raise DeviceError("a capture inside a capture")
        self._capture = []
        try:
            record()
            return FakeGraph(self, self._capture)
        finally:
            self._capture = None

    def synchronize(self) -> None:
        if self._capture is not None:
            raise DeviceError("a wait inside a capture")
        while self._queue:
            self.poll()

    def poll(self) -> None:
        """The device gets on: the oldest replay that waits runs to its end."""
        if self._queue:
            for work in self._queue.popleft():
                self._run(work)

    def free_memory(self) -> int:
        return self.memory.total - self.memory.used

    def queue(self, work: list[Work]) -> None:
        """A replay, now or when somebody waits."""
        self._queue.append(work)
        if not self.late:
            self.synchronize()

    @property
    def queued(self) -> int:
        """Replays that were launched and have not run."""
        return len(self._queue)

    def _do(self, work: Work) -> None:
        if self._capture is not None:
            self._capture.append(work)
        else:
            self.eager_launches += 1
            self.synchronize()
            self._run(work)

    def _run(self, work: Work) -> None:
        self.launches += 1
        if isinstance(work, KernelCall):
            args = [
                self.memory.view(a, f"argument {i} of {work.spec}") if isinstance(a, Array) else a
                for i, a in enumerate(work.args)
            ]
            self._twins[work.spec.entry](work, args)
            return
        x, w, out = (self.memory.view(a, "an operand of matmul") for a in (work.x, work.w, work.out))
        product = x.astype(np.float64) @ w.astype(np.float64).T
        out[...] = out + product if work.accumulate else product
