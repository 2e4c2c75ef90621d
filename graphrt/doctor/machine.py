"""CPU, memory, disk, Python and numba."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

from graphrt.catalog import CATALOG, DEFAULT_MODEL
from graphrt.doctor.check import Check, State, gib, pip_install
from graphrt.memory import available_memory

_SIMD = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "asimdhp", "bf16", "sve", "sve2")
_LEAST_MEMORY = 1 << 30
# numba takes the first of these that loads, unless told otherwise.
_THREAD_LAYERS = (("tbb", "tbbpool"), ("omp", "omppool"), ("workqueue", "workqueue"))


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """Model, usable cores and the SIMD sets that matter here."""
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    simd = " ".join(name for name in _SIMD if name in flags) or "no known SIMD"
    model = fields.get("model name") or platform.machine()
    return Check("CPU", "ok", f"{model}, {len(os.sched_getaffinity(0))} cores, {simd}")


def memory() -> Check:
    """What is free for weights and KV blocks, control groups included."""
    free = available_memory()
    detail = f"{gib(free)} available"
    if free < _LEAST_MEMORY:
        return Check("memory", "missing", f"{detail}, the default model wants {gib(_LEAST_MEMORY)}", "free some memory")
    return Check("memory", "ok", detail)


def disk(where: Path, model_present: bool) -> Check:
    """Space where models are kept. Without a model there, too little of it stops the first start."""
    default = CATALOG[DEFAULT_MODEL]
    wanted = default.wheel_size + default.size + default.model_size  # all three at once while converting
    existing = next(folder for folder in (where, *where.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{gib(free)} free in {where}"
    absent: State = "optional" if model_present else "missing"
    if not os.access(existing, os.W_OK):
        return Check("disk", absent, f"{where} is not writable", "set GRAPHRT_HOME")
    if free < wanted:
        return Check("disk", absent, f"{detail}, the default model wants {gib(wanted)}", "free space or set GRAPHRT_HOME")
    return Check("disk", "ok", detail)


def python() -> Check:
    """The interpreter."""
    return Check("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def numba() -> Check:
    """numba and the thread layer it will take. Without it the CPU path is NumPy alone, which works and is slow."""
    try:
        importlib.import_module("numba")
    except Exception as error:
        detail = f"not usable ({type(error).__name__}: {error}); NumPy alone serves, slower"
        return Check("numba", "optional", detail, pip_install("numba"))
    layer = next((name for name, module in _THREAD_LAYERS if _loads(f"numba.np.ufunc.{module}")), "none")
    versions = f"{importlib.metadata.version('numba')}, llvmlite {importlib.metadata.version('llvmlite')}"
    return Check("numba", "ok", f"{versions}, thread layer {layer}")


def _loads(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
