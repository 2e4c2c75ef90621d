"""The last word of a record is its step number: whoever sees that on the other side may read the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphrt.capture.delta import SLOT_STRUCT, DeltaWriter
from graphrt.capture.step_buffers import StepBuffers, StepSizes
from graphrt.capture.token_ring import TokenReader
from graphrt.kernels import abi
from graphrt.kernels.abi import Field, SlotState
from graphrt.kernels.array import Array, host_array
from graphrt.kernels.numpy_ops import NumpyOps

VOCAB = 24
SIZES = StepSizes((2,), (4,), (4,), 2)


class Watched(np.ndarray):
    """Keeps a list of the bytes that assignments change, as (address, length)."""

    log: list[tuple[int, int]]

    def __array_finalize__(self, origin: Any) -> None:
        self.log = getattr(origin, "log", [])

    def __setitem__(self, key: Any, value: Any) -> None:
        at = np.ndarray.__getitem__(self, key if not isinstance(key, int | np.integer) else slice(key, key + 1))
        self.log.append((at.ctypes.data, at.nbytes))
        np.ndarray.__setitem__(self, key, value)


def watched(array: Array, log: list[tuple[int, int]]) -> Array:
    view = array.np.view(Watched)
    view.log = log
    return replace(host_array(view), owner=array)


class Words:
    """A delta record that keeps the order in which its words are written."""

    def __init__(self, words: memoryview) -> None:
        self.words, self.log = words, list[int]()

    def __len__(self) -> int:
        return len(self.words)

    def __setitem__(self, key: int | slice, value: Any) -> None:
        self.log.append(key.start if isinstance(key, slice) else key)
        self.words[key] = value  # type: ignore[assignment]


def slot(serial: int) -> bytes:
    """Samples greedily and reports log-probabilities."""
    return SLOT_STRUCT.pack(
        3, 1, 99, SlotState.RUNNING, serial, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, *[0] * 8, 0, 0, 0, 2, *[0] * 5
    )


@pytest.fixture
def buffers() -> StepBuffers:
    return StepBuffers(NumpyOps(), SIZES, slots=2, max_blocks=5, vocab=VOCAB, caches={})


def test_the_step_number_ends_a_token_record(buffers: StepBuffers) -> None:
    ops, delta = NumpyOps(), DeltaWriter(buffers.delta)
    log: list[tuple[int, int]] = []
    view = buffers.view("decode", 2)
    view = replace(view, token_ring=watched(view.token_ring, log), logprob_ring=watched(view.logprob_ring, log))
    for number in (1, 2):
        for s in (0, 1):
            delta.patch_slot(s, slot(number))
        delta.patch(Field.DECODE_ROWS, 0, [0, 1])
        delta.publish()
        log.clear()
        ops.begin_step(view)
        logits = ops.empty(2, VOCAB)
        logits.np[:] = np.arange(VOCAB)
        ops.sample(logits, view)
        ops.commit_step(view)
        entry = buffers.token_ring[number].np
        assert log[-1] == (entry.ctypes.data, 4), "the step number is the last word written"
        assert (entry.ctypes.data, 4) not in log[:-1]
        outputs = buffers.logprob_ring[number].np
        assert any(outputs.ctypes.data <= at < outputs.ctypes.data + outputs.nbytes for at, _ in log)
        rows = TokenReader(buffers.token_ring, buffers.logprob_ring, buffers.stamps).read(number, 1)
        assert [(r.slot, r.serial, r.token) for r in rows] == [(0, number, VOCAB - 1), (1, number, VOCAB - 1)]


def test_the_step_number_ends_a_delta_record(buffers: StepBuffers) -> None:
    delta = DeltaWriter(buffers.delta)
    entries = [Words(words) for words in delta._entries]
    delta._entries = entries  # type: ignore[assignment]
    delta.patch_slot(0, slot(1))
    delta.patch(Field.DECODE_ROWS, 0, [0, 1])
    delta.patch(Field.BLOCK_TABLE, 0, [7])
    delta.publish()
    log = entries[1].log
    assert log[-1] == 0 and 0 not in log[:-1] and len(log) > 8
    assert not any(entries[i].log for i in (0, 2, 3))


def test_step_numbers_wrap_after_the_last_32_bit_word(buffers: StepBuffers) -> None:
    ops, delta = NumpyOps(), DeltaWriter(buffers.delta)
    reader, view = TokenReader(buffers.token_ring, buffers.logprob_ring, buffers.stamps), buffers.view("decode", 2)
    delta.step = 0xFFFFFFF9  # a lap before the end: every entry of the rings has been used
    buffers.control.np[0] = delta.step
    delta.patch_slot(0, slot(1))
    delta.patch(Field.DECODE_ROWS, 0, [0, abi.PAD])
    numbers = []
    for _ in range(9):
        numbers.append(number := delta.publish())
        assert not reader.ready(number)
        ops.begin_step(view)
        logits = ops.empty(2, VOCAB)
        logits.np[:] = np.arange(VOCAB)
        ops.sample(logits, view)
        ops.commit_step(view)
        assert reader.read(number, 1)[0] == (0, 1, VOCAB - 1, 0)
    assert numbers[4:] == [0xFFFFFFFE, 0xFFFFFFFF, 0, 1, 2]
