"""The call and the twin of `sample.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrt.kernels.array import Array, host_array
from graphrt.kernels.cuda.checks import F32, contiguous, shaped, typed
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.cuda.step_twin import host_view
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.step_state import StepView

THREADS = 512
MAX_CLUSTER = 8
BLOCKS_PER_SM = 2
MAX_VOCAB = 262144
ARRAYS = (
    "sample_rows",
    "row_slot",
    "positions",
    "targets",
    "slots",
    "output_counts",
    "next_tokens",
    "bias_ids",
    "bias_values",
    "prompt_seen",
    "control",
    "logprob_ring",
    "token_ring",
    "stamps",
)


def sample_spec(cluster: int, commit: bool = False) -> KernelSpec:
    """cluster: blocks that share a row, a power of two up to 8. commit: the last row ends the step."""
    return KernelSpec.of("sample.cu", "sample", cluster=cluster, commit=commit, threads=THREADS)


def cluster_of(driver: Driver, samples: int) -> int:
    """As many blocks a row as the card holds at once."""
    cluster = MAX_CLUSTER
    while cluster > 1 and samples * cluster > BLOCKS_PER_SM * driver.sm_count:
        cluster //= 2
    return cluster


def workspace_shape() -> tuple[int, ...]:
    """Of the zeroed uint32 array that `sample` needs to end a step; the kernel leaves it zeroed."""
    return (1,)


def sample(
    driver: Driver, logits: Array, b: StepView, workspace: Array | None = None, cluster: int | None = None
) -> KernelCall:
    """next_tokens[i] = the sample of logits[i], and log-probabilities of rows that ask: `Ops.sample`.

    logits: [S, V] float32. With a workspace (`workspace_shape`) the same launch does what `commit_step` does.
    Tokens are those of `kernels.sampling` but where two noisy values differ by less than what float64 rounds, or where the running
    weight reaches top_p to within 2^-21 of all: there the cut may fall one token further.
    """
    arrays = tuple(getattr(b, name) for name in ARRAYS)
    contiguous(logits, *arrays)
    typed(logits, F32, what="logits")
    vocab = b.output_counts.shape[1]
    shaped(logits, (b.samples, vocab), "logits")
    if vocab > MAX_VOCAB:
        raise ValueError(f"sample: a vocabulary of {vocab} tokens, at most {MAX_VOCAB} are supported")
    cluster = cluster or cluster_of(driver, b.samples)
    ints = (
        vocab,
        b.rows,
        b.samples,
        b.prompt_seen.shape[1],
        *b.logprob_ring.shape[:2],
        b.token_ring.shape[1],
    )
    return KernelCall(
        sample_spec(cluster, workspace is not None),
        (cluster * b.samples, 1, 1),
        (THREADS, 1, 1),
        (logits, *arrays, workspace, *(np.int32(i) for i in ints)),
        cluster=cluster,
    )


def sample_twin(call: KernelCall, args: list[Any]) -> None:
    """`NumpyStepEnds.sample`, and `commit_step` where the kernel does that too."""
    logits, samples = args[0], int(args[-5])
    arrays = dict(zip(ARRAYS, args[1 : 1 + len(ARRAYS)], strict=True))
    b = host_view("decode", int(args[-6]), samples, **arrays)
    ops = NumpyOps()
    ops.sample(host_array(logits), b)
    if call.spec["commit"]:
        ops.commit_step(b)


TWINS = {"sample": sample_twin}


def representative_specs() -> list[KernelSpec]:
    """Every cluster size, with the step's end, and one without."""
    return [*(sample_spec(cluster, commit=True) for cluster in (1, 2, 4, 8)), sample_spec(8)]
