"""GPU, driver, and the CUDA packages of Python."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable

from graphrt.doctor.check import Check, gib, pip_install
from graphrt.doctor.driver import Driver, on_pci, probe
from graphrt.kernels.cuda.jit import MIN_CAPABILITY

_NVRTC = pip_install("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "cuda-core[cu13]")
_CUBLAS = pip_install("nvidia-cublas")
_CUPY = pip_install("cupy-cuda13x[ctk]")
_DRIVER = "install NVIDIA driver 580 or newer"


def checks() -> list[Check]:
    """GPU, driver, NVRTC, cuda.core, cuBLAS and CuPy; none of them is needed to serve on the CPU."""
    driver = probe()
    return [
        gpu(driver),
        driver_release(driver),
        package("NVRTC", "cuda.bindings.nvrtc", "nvidia-cuda-nvrtc", _NVRTC, _nvrtc_version),
        package("cuda.core", "cuda.core", "cuda-core", _NVRTC),
        package("cuBLAS", "cuda.pathfinder", "nvidia-cublas", _CUBLAS, _cublas_version),
        package("CuPy", "cupy", "cupy-cuda13x", _CUPY),
    ]


def gpu(driver: Driver) -> Check:
    """The devices that the driver sees."""
    if not driver.gpus:
        return Check("GPU", "optional", f"{driver.problem}; the CPU serves")
    names = [f"{g.name} ({gib(g.memory)}, sm_{g.capability[0]}{g.capability[1]})" for g in driver.gpus]
    each = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if driver.gpus[0].capability < MIN_CAPABILITY:
        least = "".join(map(str, MIN_CAPABILITY))
        return Check("GPU", "optional", f"{each}; needed is sm_{least} (Hopper) or newer; the CPU serves")
    return Check("GPU", "ok", each)


def driver_release(driver: Driver) -> Check:
    """The driver's release and the newest CUDA it supports."""
    if driver.cuda is None:
        return Check("driver", "optional", driver.problem, _DRIVER if driver.release or on_pci() else "")
    detail = f"{driver.release or 'release unknown'}, supports CUDA {driver.cuda[0]}.{driver.cuda[1]}"
    return Check("driver", "ok", detail) if driver.fits else Check("driver", "optional", f"{detail}: {driver.problem}", _DRIVER)


def package(name: str, module: str, distribution: str, fix: str, version: Callable[[], str] | None = None) -> Check:
    """A Python package that is imported to see that it works, not only that it is there."""
    try:
        importlib.import_module(module)
        return Check(name, "ok", version() if version else importlib.metadata.version(distribution))
    except ModuleNotFoundError:
        return Check(name, "optional", "not installed", fix)
    except Exception as error:  # a broken install fails in many ways: a missing library, a driver too old
        reason = str(error).strip().splitlines()
        return Check(name, "optional", f"does not load: {type(error).__name__}: {reason[0] if reason else ''}", fix)


def _cublas_version() -> str:
    importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cublas")
    try:
        return importlib.metadata.version("nvidia-cublas")
    except importlib.metadata.PackageNotFoundError:
        return "found"  # of a toolkit beside Python


def _nvrtc_version() -> str:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"nvrtcVersion gives {status}")
    return f"{major}.{minor}"
