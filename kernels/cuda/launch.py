"""One kernel launch, checked and frozen: what a capture records.

Pointers are passed as plain integers (`Array.ptr`) and become 64-bit arguments; every other argument must be a NumPy scalar of the
parameter's own type (`np.int32`, `np.float32`), so that nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphrt.errors import DeviceError

if TYPE_CHECKING:
    from cuda.core import Kernel

Dim = tuple[int, int, int]
Arg = int | np.int32 | np.uint32 | np.float32

SMEM_OPT_IN = 48 * 1024  # above this a kernel must be told that it may take more


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its shape. pdl: it may start before its predecessor in the stream ends; every kernel here waits by itself."""

    kernel: Kernel
    grid: Dim
    block: Dim
    smem: int = 0
    pdl: bool = True
    name: str = ""

    def __call__(self, stream: Any, *args: Arg) -> None:
        """Launch on a cuda.core Stream or GraphBuilder. DeviceError names the kernel and the shape."""
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(
            grid=self.grid, block=self.block, shmem_size=self.smem, programmatic_stream_serialization=self.pdl
        )
        try:
            launch(stream, config, self.kernel, *args)
        except Exception as error:
            shape = f"grid {self.grid}, block {self.block}, {self.smem} bytes of shared memory"
            raise DeviceError(f"launching {self.name or 'a kernel'} ({shape}): {error}") from error


def allow_smem(kernel: Kernel, smem: int, device_id: int) -> None:
    """Let a kernel take `smem` bytes of dynamic shared memory on one device. DeviceError when that is more than it has."""
    from cuda.bindings import driver

    if smem <= SMEM_OPT_IN:
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, smem, kernel.handle, driver.CUdevice(device_id))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"cuKernelSetAttribute: {smem} bytes of shared memory a block: {status.name}")
