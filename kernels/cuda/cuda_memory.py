"""Memory of a GPU and memory that it shares with the host, freed with the last array that refers to it."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphrt.errors import DeviceError
from graphrt.kernels.array import Array
from graphrt.kernels.cuda.cuda_call import check, failure


class DeviceMemory:
    """One cuMemAlloc."""

    def __init__(self, nbytes: int) -> None:
        from cuda.bindings import driver as cu

        status, ptr = cu.cuMemAlloc(nbytes)
        if status == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = check(cu.cuMemGetInfo)
            raise DeviceError(
                f"not enough GPU memory: {nbytes / 2**30:.2f} GiB needed, {free / 2**30:.2f} of {total / 2**30:.2f} GiB free"
            )
        if status:
            raise DeviceError(failure("cuMemAlloc", status, f"{nbytes} bytes"))
        self.ptr = int(ptr)
        # Not at exit: the driver frees everything then, and may be gone already.
        weakref.finalize(self, cu.cuMemFree, ptr).atexit = False


class HostMemory:
    """One cuMemHostAlloc: pinned, and at the same time in the device's address space."""

    def __init__(self, nbytes: int) -> None:
        from cuda.bindings import driver as cu

        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        host = int(check(cu.cuMemHostAlloc, nbytes, flags, what=f"{nbytes} bytes"))
        self.ptr = int(check(cu.cuMemHostGetDevicePointer, host, 0))
        self.__array_interface__ = {"data": (host, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        weakref.finalize(self, cu.cuMemFreeHost, host).atexit = False


def device_array(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Uninitialised device memory. DeviceError when there is not enough."""
    dt: np.dtype[Any] = np.dtype(dtype)
    memory = DeviceMemory(max(_nbytes(shape, dt), 1))
    return Array(memory.ptr, shape, dt, contiguous(shape, dt), memory)


def mapped_array(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeroed host memory that the device reads and writes too; the NumPy view keeps it alive as well."""
    dt: np.dtype[Any] = np.dtype(dtype)
    nbytes = max(_nbytes(shape, dt), 1)
    memory = HostMemory(nbytes)
    raw: NDArray[np.uint8] = np.asarray(memory)
    raw[:] = 0
    host = np.ndarray(shape, dt, raw)
    return Array(memory.ptr, shape, dt, host.strides, memory, host)


def contiguous(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Strides in bytes of a row-major array."""
    strides, step = [], dtype.itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def copy_in(dst: Array, src: NDArray[Any], stream: Any) -> None:
    """Copy to the device in the stream's order, and wait. Both contiguous, of one shape and type."""
    from cuda.bindings import driver as cu

    if src.shape != dst.shape or src.dtype != dst.dtype or dst.strides != contiguous(dst.shape, dst.dtype):
        raise DeviceError(
            f"upload: {src.dtype} {src.shape} does not fit {dst.dtype} {dst.shape}, strides {dst.strides}"
        )
    packed = np.ascontiguousarray(src)
    if packed.nbytes:
        check(cu.cuMemcpyHtoDAsync, cu.CUdeviceptr(dst.ptr), packed.ctypes.data, packed.nbytes, stream, what="upload")
    check(cu.cuStreamSynchronize, stream, what="upload")


def copy_out(src: Array, stream: Any) -> NDArray[Any]:
    """Copy from the device after all that the stream holds. Strided arrays bring the gaps along."""
    from cuda.bindings import driver as cu

    reach = sum((n - 1) * s for n, s in zip(src.shape, src.strides, strict=True)) + src.dtype.itemsize
    if 0 in src.shape or any(s < 0 for s in src.strides):
        return np.empty(src.shape, src.dtype)
    raw = np.empty(reach, np.uint8)
    check(cu.cuMemcpyDtoHAsync, raw.ctypes.data, cu.CUdeviceptr(src.ptr), reach, stream, what="download")
    check(cu.cuStreamSynchronize, stream, what="download")
    return np.ndarray(src.shape, src.dtype, raw, 0, src.strides).copy()


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
