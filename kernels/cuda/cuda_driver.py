"""A GPU: memory, launches on one stream, capture, replay.

The one clever thing: all work goes to one stream, so order is program order, and what is captured is exactly what would have run.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphrt.errors import DeviceError
from graphrt.kernels.array import Array
from graphrt.kernels.cuda import cuda_memory
from graphrt.kernels.cuda.cublas import WORKSPACE, Cublas
from graphrt.kernels.cuda.cuda_call import check, failure
from graphrt.kernels.cuda.driver import KernelCall, check_call, describe
from graphrt.kernels.cuda.jit import Jit, KernelSpec, Progress, check_packages, device_arch

SMEM_DEFAULT = 32 * 1024  # bytes of dynamic shared memory that any kernel may take, whatever it declares itself
MAX_COMPILERS = 16  # threads


class CudaGraph:
    """A captured and instantiated graph. Everything its nodes point to stays alive with it."""

    def __init__(self, driver: CudaDriver, graph: Any, held: list[Any]) -> None:
        from cuda.bindings import driver as cu

        self._driver, self._graph, self._held = driver, graph, held
        self.nodes = int(check(cu.cuGraphGetNodes, graph, 0)[1])
        count = int(check(cu.cuGraphGetEdges, graph, 0)[3])
        kinds = [int(e.type) for e in check(cu.cuGraphGetEdges, graph, count)[2]] if count else []
        self.programmatic_edges = kinds.count(int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC))
        self.plain_edges = count - self.programmatic_edges
        self._exec = check(cu.cuGraphInstantiate, graph, 0)
        weakref.finalize(self, cu.cuGraphExecDestroy, self._exec).atexit = False
        weakref.finalize(self, cu.cuGraphDestroy, graph).atexit = False
        check(cu.cuGraphUpload, self._exec, driver.handle)
        self._launch, self._stream = cu.cuGraphLaunch, driver.handle

    def launch(self) -> None:
        """Queue a replay. DeviceError also for an earlier failure of the device."""
        if status := self._launch(self._exec, self._stream)[0]:
            raise DeviceError(failure("cuGraphLaunch", status))

    def dot(self) -> str:
        """The graph as the driver sees it."""
        from cuda.bindings import driver as cu

        flags = cu.CUgraphDebugDot_flags.CU_GRAPH_DEBUG_DOT_FLAGS_KERNEL_NODE_PARAMS
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "graph.dot"
            check(cu.cuGraphDebugDotPrint, self._graph, str(path).encode(), int(flags))
            return path.read_text()


class CudaDriver:
    """One GPU and one stream. `stream`: cuda.core's; `handle`: the driver API's."""

    def __init__(
        self, device_id: int = 0, *, cache_dir: Path | None = None, carveout: int = 100, stress: bool = False
    ) -> None:
        """cache_dir: where compiled kernels are kept; None to compile every time.

        carveout: per cent of a multiprocessor's memory that is shared memory, for every kernel: a multiprocessor cannot
        change it while blocks run, so kernels that are to overlap must ask for the same.
        stress: every kernel lets its successor start as early and stores as late as it may, so that a missing wait shows.
        DeviceError when there is no usable GPU, it is too old, or packages are missing.
        """
        check_packages()
        from cuda.core import Device

        try:
            self.device = Device(device_id)
            self.device.set_current()
            self.stream = self.device.create_stream()
        except Exception as error:
            raise DeviceError(f"GPU {device_id} cannot be used: {error}") from error
        self.device_id, self._carveout, self._stress = device_id, carveout, stress
        self.handle = self.stream.handle
        self.name = str(self.device.name)
        self.arch = device_arch(self.device)
        self.sm_count = int(self.device.properties.multiprocessor_count)
        self.smem_per_block = int(self.device.properties.max_shared_memory_per_block_optin)
        self.jit = Jit(self.arch, cache_dir)
        self.allocations = self.eager_launches = 0
        self._smem: dict[KernelSpec, int] = {}  # what each loaded kernel may take
        self._cublas: Cublas | None = None
        self._capture: list[Any] | None = None

    def alloc(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        from cuda.bindings import driver as cu

        self._allocates()
        array = cuda_memory.device_array(shape, dtype)
        if array.nbytes:
            check(cu.cuMemsetD8Async, cu.CUdeviceptr(array.ptr), 0, array.nbytes, self.handle)
        return array

    def alloc_mapped(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        self._allocates()
        return cuda_memory.mapped_array(shape, dtype)

    def _allocates(self) -> None:
        if self._capture is not None:
            raise DeviceError("an allocation inside a capture")
        self.allocations += 1

    def upload(self, dst: Array, src: NDArray[Any]) -> None:
        cuda_memory.copy_in(dst, src, self.handle)

    def download(self, src: Array) -> NDArray[Any]:
        return cuda_memory.copy_out(src, self.handle)

    def launch(self, call: KernelCall) -> None:
        from cuda.core import LaunchConfig, launch

        check_call(self, call)
        kernel = self._kernel(call)
        x, y, z = call.grid
        config = LaunchConfig(
            grid=(x // call.cluster, y, z),  # in clusters, where there are any
            cluster=(call.cluster, 1, 1) if call.cluster > 1 else None,
            block=call.block,
            shmem_size=call.smem,
            programmatic_stream_serialization=call.pdl,
        )
        args = [a.ptr if isinstance(a, Array) else 0 if a is None else a for a in call.args]
        try:
            launch(self.stream, config, kernel, *args)
        except Exception as error:
            raise DeviceError(f"launching {describe(call)}: {error}") from error
        self._note(call)

    def _kernel(self, call: KernelCall) -> Any:
        from cuda.bindings import driver as cu

        kernel = self.jit.kernel(self._built(call.spec))
        allowed = self._smem.get(call.spec, 0)
        if not allowed or call.smem > allowed:
            attributes, device = cu.CUfunction_attribute, cu.CUdevice(self.device_id)
            allowed = max(call.smem, SMEM_DEFAULT)
            for attribute, value in (
                (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, allowed),
                (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, self._carveout),
            ):
                check(cu.cuKernelSetAttribute, attribute, value, kernel.handle, device, what=describe(call))
            self._smem[call.spec] = allowed
        return kernel

    def matmul(self, x: Array, w: Array, out: Array, accumulate: bool) -> None:
        if self._cublas is None:
            self._cublas = Cublas(int(self.handle), self.alloc((WORKSPACE,), np.uint8))
        self._cublas.matmul(x, w, out, accumulate)
        self._note((x, w, out))

    def _note(self, held: Any) -> None:
        if self._capture is None:
            self.eager_launches += 1
        else:
            self._capture.append(held)

    def prepare(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        self.jit.prepare(map(self._built, specs), min(os.cpu_count() or 1, MAX_COMPILERS), progress)

    def _built(self, spec: KernelSpec) -> KernelSpec:
        return spec.with_options(pdl_stress=1) if self._stress else spec

    def capture(self, record: Callable[[], None]) -> CudaGraph:
        from cuda.bindings import driver as cu

        if self._capture is not None:
            raise DeviceError("a capture inside a capture")
        # Relaxed: a library may load a kernel when it is first asked for it.
        check(cu.cuStreamBeginCapture, self.handle, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        held: list[Any] = []
        self._capture = held
        try:
            record()
        except BaseException:
            cu.cuStreamEndCapture(self.handle)
            raise
        finally:
            self._capture = None
        return CudaGraph(self, check(cu.cuStreamEndCapture, self.handle), held)

    def synchronize(self) -> None:
        from cuda.bindings import driver as cu

        check(cu.cuStreamSynchronize, self.handle)

    def poll(self) -> None:
        from cuda.bindings import driver as cu

        (status,) = cu.cuStreamQuery(self.handle)
        if status not in (cu.CUresult.CUDA_SUCCESS, cu.CUresult.CUDA_ERROR_NOT_READY):
            raise DeviceError(failure("cuStreamQuery", status))

    def free_memory(self) -> int:
        from cuda.bindings import driver as cu

        return int(check(cu.cuMemGetInfo)[0])
