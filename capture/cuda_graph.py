"""From a step function to captured graphs on a device: measure, compile, warm, capture.

The one clever thing: the step runs four times without ever running. Dry, to learn which kernels there are and how large the arena is; for
its library products alone, because a library loads kernels when it first meets a shape; under capture; and then it is only replayed.
"""

from __future__ import annotations

from collections.abc import Callable

from graphrt.capture.graph import GraphSet, StepFunction
from graphrt.capture.step_buffers import StepBuffers
from graphrt.errors import ModelError
from graphrt.kernels.cuda.driver import Driver, Graph
from graphrt.kernels.cuda.jit import Progress
from graphrt.kernels.cuda.ops import CudaOps
from graphrt.kernels.step_state import StepKind, StepView


class CudaGraphSet(GraphSet):
    """Captured graphs, and proof that nothing happens beside them."""

    def __init__(self, ops: CudaOps, buffers: StepBuffers, make: Callable[[StepView], Graph]) -> None:
        self.captured: dict[tuple[StepKind, int], Graph] = {}

        def keep(view: StepView) -> Graph:
            return self.captured.setdefault((view.kind, view.rows), make(view))

        super().__init__(ops, buffers, keep)
        self._driver: Driver = ops.driver
        self._launches, self._allocations = self._driver.eager_launches, self._driver.allocations

    @property
    def eager_launches(self) -> int:
        return self._driver.eager_launches - self._launches

    @property
    def late_allocations(self) -> int:
        return self._driver.allocations - self._allocations


def capture_graphs(
    ops: CudaOps, buffers: StepBuffers, step: StepFunction, progress: Progress | None = None
) -> CudaGraphSet:
    """One graph for every kind and size of `buffers`.

    ModelError when no kernel takes the model's shape, DeviceError when one does not compile or memory runs out.

    progress: told of every kernel that was compiled or found in the cache.
    """

    def run(view: StepView) -> None:
        ops.begin_step(view)
        ops.sample(step(view), view)
        ops.commit_step(view)

    views = [buffers.view(kind, size) for kind, sizes in buffers.sizes.by_kind().items() for size in sizes]
    try:
        with ops.dry_run() as seen:
            for view in views:
                run(view)
    except (ValueError, TypeError) as error:
        raise ModelError(f"this model does not run on the GPU: {error}") from error
    ops.driver.prepare(seen.specs, progress)
    with ops.products_only():
        for view in views:
            run(view)
    ops.driver.synchronize()
    return CudaGraphSet(ops, buffers, lambda view: ops.driver.capture(lambda: run(view)))
