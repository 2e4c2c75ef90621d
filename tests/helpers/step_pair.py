"""The same step state twice: on a device, edited by kernels, and in NumPy, edited by the step's definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphrt.capture.delta import SLOT_STRUCT, DeltaWriter
from graphrt.capture.step_buffers import StepBuffers, StepSizes
from graphrt.kernels import abi
from graphrt.kernels.abi import Field, SlotState
from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import Driver
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.step_state import StepKind, StepView

ARRAYS = (
    "tokens", "positions", "row_slot", "sample_rows", "targets", "next_tokens", "slots", "block_table", "bias_ids",
    "bias_values", "prompt_seen", "output_counts", "control", "token_ring", "logprob_ring", "decode_rows",
    "prefill_tokens", "prefill_positions", "prefill_slots", "prefill_samples", "score_targets",
)  # fmt: skip


def packed_slot(rng: np.random.Generator, **fields: Any) -> bytes:
    """A random running slot, overridden by `fields` of abi.SLOT."""
    slot = np.zeros((), abi.SLOT)
    defaults: dict[str, Any] = {
        "seq_len": rng.integers(0, 90),
        "last_token": rng.integers(0, 30),
        "max_len": rng.integers(5, 120),
        "state": SlotState.RUNNING,
        "serial": rng.integers(0, 1 << 32),
        "top_p": 1,
        "repetition_penalty": 1,
        "num_stop_ids": rng.integers(0, abi.MAX_STOP_IDS + 1),
        "stop_ids": rng.integers(0, 12, abi.MAX_STOP_IDS),
        "prompt_len": rng.integers(0, 60),
        "num_logprobs": -1,
        "seed_lo": rng.integers(0, 1 << 32),
        "seed_hi": rng.integers(0, 1 << 32),
        "fresh": rng.integers(0, 2),
    }
    for name, value in (defaults | fields).items():
        slot[name] = value
    assert len(slot.tobytes()) == SLOT_STRUCT.size
    return slot.tobytes()


class StepPair:
    """`device` and `host`: StepBuffers of equal content; every edit goes to both."""

    def __init__(self, driver: Driver, sizes: StepSizes, *, slots: int, max_blocks: int, vocab: int) -> None:
        self.driver, self.vocab = driver, vocab
        ops: Any = SimpleNamespace(alloc=driver.alloc, alloc_mapped=driver.alloc_mapped)
        self.device = StepBuffers(ops, sizes, slots=slots, max_blocks=max_blocks, vocab=vocab, caches={})
        self.host = StepBuffers(NumpyOps(), sizes, slots=slots, max_blocks=max_blocks, vocab=vocab, caches={})
        self.deltas = [DeltaWriter(self.device.delta), DeltaWriter(self.host.delta)]

    def view(self, kind: StepKind, rows: int) -> tuple[StepView, StepView]:
        return self.device.view(kind, rows), self.host.view(kind, rows)

    def patch(self, field: Field, offset: int, words: Any) -> None:
        values = np.asarray(words)
        if values.dtype == np.int64:
            values = values.astype(np.int32)
        words = values.reshape(-1).view(np.int32).tolist()
        for delta in self.deltas:
            delta.patch(field, offset, words)

    def patch_slot(self, slot: int, packed: bytes) -> None:
        for delta in self.deltas:
            delta.patch_slot(slot, packed)

    def publish(self) -> int:
        step, other = (delta.publish() for delta in self.deltas)
        assert step == other
        return step

    def fill(self, name: str, values: NDArray[Any]) -> None:
        """Set an array on both sides."""
        array: Array = getattr(self.device, name)
        typed = np.ascontiguousarray(values.astype(array.dtype).reshape(array.shape))
        self.driver.upload(array, typed)
        getattr(self.host, name).np[:] = typed

    def poison(self, rng: np.random.Generator, *names: str) -> None:
        """Fill arrays with the same noise on both sides, so that what is not written differs from any result."""
        for name in names:
            shape = getattr(self.device, name).shape
            self.fill(name, rng.integers(-(1 << 30), -(1 << 29), shape).astype(np.int32))

    def assert_equal(self, *names: str) -> None:
        """Bit by bit, in all arrays unless some are named."""
        for name in names or ARRAYS:
            got, want = self.driver.download(getattr(self.device, name)), getattr(self.host, name).np
            assert got.tobytes() == want.tobytes(), f"{name} differs at {np.argwhere(got != want)[:4].tolist()}"
