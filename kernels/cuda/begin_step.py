"""The call and the twin of `begin_step.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrt.kernels import abi
from graphrt.kernels.cuda.checks import contiguous
from graphrt.kernels.cuda.driver import KernelCall
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.cuda.step_twin import KINDS, host_view
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.numpy_step import next_step
from graphrt.kernels.step_state import StepView

THREADS = 256
CLUSTER = 8
CONTROL_ERROR, CONTROL_FOUND = 1, 2  # words of control, see abi.cuh
FIELDS = (
    "slots",
    "block_table",
    "decode_rows",
    "prefill_tokens",
    "prefill_positions",
    "prefill_slots",
    "prefill_samples",
    "score_targets",
    "bias_ids",
    "bias_values",
    "prompt_seen",
)  # in the order of abi.Field
OUTPUTS = ("stamps", "output_counts", "tokens", "positions", "row_slot", "sample_rows", "targets")


def begin_step_spec() -> KernelSpec:
    """One kernel for all steps."""
    return KernelSpec.of("begin_step.cu", "begin_step")


def begin_step(b: StepView) -> KernelCall:
    """Pull the record of step control[0] + 1, apply its patches, fill the rows: `Ops.begin_step`.

    delta lies in mapped memory. Without its record a step is all padding, and control[1] is 1, control[2] the number found.
    """
    arrays = (b.delta, b.control, *(getattr(b, name) for name in (*FIELDS, *OUTPUTS)))
    contiguous(*arrays)
    ints = (*b.delta.shape, b.slots.shape[0], b.output_counts.shape[1], b.rows, b.samples, KINDS.index(b.kind))
    return KernelCall(
        begin_step_spec(), (CLUSTER, 1, 1), (THREADS, 1, 1), (*arrays, *(np.int32(i) for i in ints)), cluster=CLUSTER
    )


def begin_step_twin(call: KernelCall, args: list[Any]) -> None:
    """`NumpyStepEnds.begin_step`, and a step of nothing but padding where that raises."""
    *_, rows, samples, kind = (int(i) for i in args[-7:])
    arrays = dict(zip(("delta", "control", *FIELDS, *OUTPUTS), args[:-7], strict=True))
    b = host_view(KINDS[kind], rows, samples, **arrays)
    found = b.delta.np[next_step(b) % b.delta.shape[0], 0]
    if found == next_step(b):
        NumpyOps().begin_step(b)
        return
    b.control.np[CONTROL_ERROR], b.control.np[CONTROL_FOUND] = 1, found
    b.tokens.np[:] = b.positions.np[:] = 0
    b.row_slot.np[:] = b.sample_rows.np[:] = b.targets.np[:] = abi.PAD


TWINS = {"begin_step": begin_step_twin}


def representative_specs() -> list[KernelSpec]:
    """The one there is."""
    return [begin_step_spec()]
