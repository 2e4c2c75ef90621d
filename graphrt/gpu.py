"""Whether this machine's GPU can be used, and if not, why: one line for the user."""

from __future__ import annotations

from pathlib import Path

from graphrt.doctor.driver import Driver, probe
from graphrt.errors import DeviceError
from graphrt.kernels.cuda.driver import Driver as Device
from graphrt.kernels.cuda.jit import MIN_CAPABILITY, check_packages


def problem(found: Driver | None = None) -> str:
    """Why no GPU can be used, or "". `found`: what the driver says, None to ask it."""
    found = found or probe()
    if not found.fits:
        return found.problem
    gpu = found.gpus[0]
    if gpu.capability < MIN_CAPABILITY:
        have, least = (".".join(map(str, c)) for c in (gpu.capability, MIN_CAPABILITY))
        return f"{gpu.name} has compute capability {have}, needed is {least} (Hopper) or newer"
    try:
        check_packages()
    except DeviceError as error:
        return str(error)
    return ""


def open_gpu(cache_dir: Path) -> Device:
    """The first GPU, its compiled kernels kept in `cache_dir`. DeviceError, with what to do, when it cannot be used."""
    if why := problem():
        raise DeviceError(f"device cuda: {why}; use --device cpu or auto")
    from graphrt.kernels.cuda.cuda_driver import CudaDriver

    return CudaDriver(cache_dir=cache_dir)
