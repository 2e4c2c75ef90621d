"""All kernels that there are: their twins, and the specs that CI compiles. A new kernel adds its module to `MODULES`."""

from __future__ import annotations

import importlib
from typing import Any

from graphrt.kernels.cuda.driver import Twin
from graphrt.kernels.cuda.jit import KernelSpec

MODULES: tuple[str, ...] = (
    "gemv",
    "gemm64",
    "probe",
    "fill",
    "elementwise",
    "rms_norm",
    "heads",
    "begin_step",
    "commit_step",
    "sample",
    "attention_decode",
    "attention_prefill",
)


def all_specs() -> list[KernelSpec]:
    """Every kernel with every option that selects code, at representative sizes."""
    return [spec for module in _modules() for spec in module.representative_specs()]


def all_twins() -> dict[str, Twin]:
    """The twin of each kernel by its entry. ValueError when two kernels share a name."""
    twins: dict[str, Twin] = {}
    for module in _modules():
        if shared := twins.keys() & module.TWINS.keys():
            raise ValueError(f"kernels with the same name: {sorted(shared)}")
        twins.update(module.TWINS)
    return twins


def _modules() -> list[Any]:
    return [importlib.import_module(f"graphrt.kernels.cuda.{name}") for name in MODULES]
