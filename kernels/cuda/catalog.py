"""All kernels that there are, at the shapes that CI compiles. A new kernel adds its specs to `all_specs`."""

from __future__ import annotations

from graphrt.kernels.cuda.jit import KernelSpec


def all_specs() -> list[KernelSpec]:
    """Every kernel with every option that selects code, at representative sizes."""
    return []
