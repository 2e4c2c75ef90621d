"""A `StepView` over a twin's arguments, so that the NumPy step is every end kernel's twin and nothing is described twice."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphrt.kernels.array import host_array
from graphrt.kernels.step_state import StepKind, StepView

KINDS: tuple[StepKind, ...] = ("decode", "prefill", "score")  # as begin_step.cu numbers them


def host_view(kind: StepKind, rows: int, samples: int, **arrays: NDArray[Any]) -> StepView:
    """The fields of a StepView that a kernel takes; the others are empty."""
    nothing = host_array(np.empty(0, np.int32))
    names = set(StepView.__slots__) - {"kind", "rows", "samples", "caches"}
    fields = {name: host_array(arrays[name]) if name in arrays else nothing for name in names}
    return StepView(kind=kind, rows=rows, samples=samples, caches={}, **fields)
