"""The call and the twin of `commit_step.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.checks import contiguous
from graphrt.kernels.cuda.driver import Arg, KernelCall
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.cuda.step_twin import host_view
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.step_state import StepView

THREADS = 128
ARRAYS = (
    "sample_rows",
    "row_slot",
    "positions",
    "targets",
    "next_tokens",
    "slots",
    "output_counts",
    "token_ring",
    "control",
    "stamps",
)


def commit_step_spec() -> KernelSpec:
    """One kernel for all steps."""
    return KernelSpec.of("commit_step.cu", "commit_step")


def commit_args(b: StepView) -> tuple[Arg, ...]:
    """What commit.cuh takes, in its order."""
    arrays: tuple[Array, ...] = tuple(getattr(b, name) for name in ARRAYS)
    contiguous(*arrays)
    ints = (*b.token_ring.shape, b.output_counts.shape[1], b.samples)
    return (*arrays, *(np.int32(i) for i in ints))


def commit_step(b: StepView) -> KernelCall:
    """Sampled tokens to their slots, to the output counts and to the token ring, step number last: `Ops.commit_step`.

    token_ring lies in mapped memory.
    """
    return KernelCall(commit_step_spec(), (1, 1, 1), (THREADS, 1, 1), commit_args(b))


def commit_step_twin(call: KernelCall, args: list[Any]) -> None:
    """`NumpyStepEnds.commit_step`."""
    samples = int(args[-1])
    arrays = dict(zip(ARRAYS, args[: len(ARRAYS)], strict=True))
    NumpyOps().commit_step(host_view("decode", len(arrays["row_slot"]), samples, **arrays))


TWINS = {"commit_step": commit_step_twin}


def representative_specs() -> list[KernelSpec]:
    """The one there is."""
    return [commit_step_spec()]
