"""What the NVIDIA driver can do, asked through libcuda alone.

Standard library only, and runnable as a file before anything is installed: exit 0 where the driver supports CUDA 13 and
sees a GPU, else 1, with one line that says which.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from pathlib import Path

WANTED_CUDA = (13, 0)
_NVIDIA = "0x10de"  # PCI vendor
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """One device: `memory` in bytes, `capability` as (major, minor)."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """The driver found. `cuda` is the newest CUDA it supports; `problem` says why no GPU is usable, "" if one is."""

    cuda: tuple[int, int] | None
    release: str
    gpus: tuple[Gpu, ...]
    problem: str

    @property
    def fits(self) -> bool:
        """True where the packages of the `cuda` extra can run."""
        return not self.problem


def probe() -> Driver:
    """Ask the driver. Never raises: whatever fails becomes `problem`."""
    release = _kernel_module_release()
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError:
        if release:
            return Driver(None, release, (), f"the kernel module {release} is loaded but libcuda.so.1 is not found")
        return Driver(None, "", (), "an NVIDIA GPU without its driver" if on_pci() else "no NVIDIA GPU")
    number = ctypes.c_int()
    if lib.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return Driver(None, release, (), "libcuda.so.1 does not answer cuDriverGetVersion")
    cuda = (number.value // 1000, number.value % 1000 // 10)
    failed = lib.cuInit(0)
    if failed:
        return Driver(cuda, release, (), f"cuInit fails: {_error_name(lib, failed)}")
    gpus = _devices(lib)
    problem = ""
    if not gpus:
        problem = "the driver sees no GPU"
    elif cuda < WANTED_CUDA:
        problem = f"the driver supports CUDA {cuda[0]}.{cuda[1]}, needed is 13.0 (driver 580 or newer)"
    return Driver(cuda, release, gpus, problem)


def on_pci(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """True if the machine holds an NVIDIA display or compute device, driver or not."""
    for vendor in devices.glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == _NVIDIA and (vendor.parent / "class").read_text().startswith("0x03"):
                return True
    return False


def _devices(lib: ctypes.CDLL) -> tuple[Gpu, ...]:
    count = ctypes.c_int()
    if lib.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        if lib.cuDeviceGet(ctypes.byref(handle), index) != 0:
            continue
        lib.cuDeviceGetName(name, len(name), handle)
        lib.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
        lib.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, handle)
        lib.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, handle)
        found.append(Gpu(name.value.decode(errors="replace"), memory.value, (major.value, minor.value)))
    return tuple(found)


def _error_name(lib: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    if lib.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value:
        return text.value.decode()
    return f"error {code}"


def _kernel_module_release() -> str:
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    return ""


if __name__ == "__main__":
    driver = probe()
    if driver.fits:
        assert driver.cuda is not None
        print(f"{driver.gpus[0].name}, driver with CUDA {driver.cuda[0]}.{driver.cuda[1]}")
    else:
        print(driver.problem)
    raise SystemExit(0 if driver.fits else 1)
