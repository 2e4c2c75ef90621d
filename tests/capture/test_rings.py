"""Delta records in, token records out, and what a step makes of them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from graphrt.capture.delta import SLOT_STRUCT, DeltaWriter
from graphrt.capture.graph import CpuStepGraph, GraphSet
from graphrt.capture.step_buffers import RING_DEPTH, StepBuffers, StepSizes
from graphrt.capture.token_ring import TokenReader, TokenRow
from graphrt.errors import ConfigError, DeviceError
from graphrt.kernels import abi
from graphrt.kernels.abi import Field, SlotState, TokenFlag
from graphrt.kernels.array import Array
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.step_state import StepView

SIZES = StepSizes((1, 2, 4), (4, 8), (4,), 2)
VOCAB = 50


def test_waiting_asks_the_device_and_sees_what_comes_late() -> None:
    """The record appears while the wait polls; a device that has failed is an error at once, a silent one after the timeout."""
    buffers = StepBuffers(NumpyOps(), SIZES, slots=3, max_blocks=5, vocab=VOCAB, caches={})
    asked = []

    def poll() -> None:
        asked.append(time.monotonic())
        if len(asked) == 150:
            buffers.token_ring.np[5 % RING_DEPTH, 0] = 5
        if len(asked) > 150:
            raise DeviceError("an illegal memory access")

    reader = TokenReader(buffers.token_ring, buffers.logprob_ring, buffers.stamps, poll)
    assert reader.read(5, 60) == [] and len(asked) == 150
    cpu, start = time.process_time(), time.monotonic()
    with pytest.raises(DeviceError, match="illegal memory access"):
        reader.read(6, 60)
    quiet = TokenReader(buffers.token_ring, buffers.logprob_ring, buffers.stamps)
    with pytest.raises(DeviceError, match=r"step 6 did not finish within 0.5 s: the device hangs"):
        quiet.read(6, 0.5)
    assert time.process_time() - cpu < 0.8 * (time.monotonic() - start), "a long wait sleeps"


class Echo:
    """A model whose sample after token t is t + 1."""

    def __init__(self) -> None:
        self.ops = NumpyOps()
        self.buffers = StepBuffers(self.ops, SIZES, slots=3, max_blocks=5, vocab=VOCAB, caches={})
        self.delta, self.reader = (
            DeltaWriter(self.buffers.delta),
            TokenReader(self.buffers.token_ring, self.buffers.logprob_ring, self.buffers.stamps),
        )
        self.graphs = GraphSet(self.ops, self.buffers, lambda view: CpuStepGraph(self.ops, self.step, view))

    def step(self, b: StepView) -> Array:
        logits = self.ops.empty(b.samples, VOCAB)
        logits.np[:] = np.nan  # rows that nobody samples
        for i, row in enumerate(b.sample_rows.np):
            if row != abi.PAD:
                logits.np[i] = -np.arange(VOCAB)
                logits.np[i, (b.tokens.np[row] + 1) % VOCAB] = 1
        return logits

    def run(self, kind: str, size: int) -> list[TokenRow]:
        number = self.delta.publish()
        self.buffers.next_tokens.np[:] = -77
        self.graphs[kind, size].launch()  # type: ignore[index]
        return self.reader.read(number, 1)

    def slot(self, slot: int, *, seq_len: int, last: int, serial: int, max_len: int = 99, stop: int = -1) -> None:
        stops = [stop, *[0] * 7]
        self.delta.patch_slot(
            slot,
            SLOT_STRUCT.pack(
                seq_len,
                last,
                max_len,
                SlotState.RUNNING,
                serial,
                0,
                0,
                1,
                0,
                0,
                0,
                1,
                0,
                0,
                stop >= 0,
                *stops,
                *[0] * 9,
            ),
        )


def test_the_packed_slot_is_the_declared_slot() -> None:
    packed = SLOT_STRUCT.pack(
        1, 2, 3, 4, 5, 6.5, 7, 8.5, 9.5, 10, 11, 12.5, 13.5, 14.5, 2, *range(20, 28), *range(30, 35), *[0] * 4
    )
    slot = np.frombuffer(packed, abi.SLOT)[0]
    names = [n for n in abi.SLOT.names or () if n not in ("stop_ids", "spare")]
    assert [float(slot[n]) for n in names] == [
        1,
        2,
        3,
        4,
        5,
        6.5,
        7,
        8.5,
        9.5,
        10,
        11,
        12.5,
        13.5,
        14.5,
        2,
        *range(30, 35),
    ]
    assert slot["stop_ids"].tolist() == list(range(20, 28))


def test_decode_follows_the_slots_without_the_host() -> None:
    e = Echo()
    e.slot(0, seq_len=10, last=7, serial=3)
    e.slot(2, seq_len=20, last=30, serial=4)
    e.delta.patch(Field.DECODE_ROWS, 0, [2, 0, abi.PAD, abi.PAD])
    assert e.run("decode", 4) == [(2, 4, 31, 0), (0, 3, 8, 0), (abi.PAD, 0, 0, 0), (abi.PAD, 0, 0, 0)]
    for i in range(1, 2 * RING_DEPTH):  # the rings wrap; no edit is needed
        assert e.run("decode", 2) == [(2, 4, 31 + i, 0), (0, 3, 8 + i, 0)]
    slots = e.buffers.slots.np.view(abi.SLOT)[:, 0]
    assert slots["seq_len"].tolist() == [10 + 2 * RING_DEPTH, 0, 20 + 2 * RING_DEPTH]


def test_padding_rows_write_nowhere() -> None:
    e = Echo()
    e.slot(1, seq_len=10, last=7, serial=3)
    e.delta.patch(Field.DECODE_ROWS, 0, [abi.PAD, 1, abi.PAD, abi.PAD])
    e.run("decode", 1)
    before = e.buffers.slots.np.copy()
    e.buffers.slots.np[2] = 7  # the last slot: where an index of -1 would land
    e.buffers.slots.np.view(abi.SLOT)["fresh"][2] = 0
    poisoned = e.buffers.slots.np[2].copy()
    rows = e.run("decode", 4)
    assert rows[1] == (1, 3, 8, 0) and [r.slot for r in rows] == [abi.PAD, 1, abi.PAD, abi.PAD]
    assert (e.buffers.slots.np[2] == poisoned).all() and (e.buffers.slots.np[0] == before[0]).all()
    assert e.buffers.next_tokens.np[[0, 2, 3]].tolist() == [-77] * 3


@pytest.mark.parametrize(("stop", "max_len", "flag"), [(8, 99, TokenFlag.STOP), (-1, 12, TokenFlag.LENGTH)])
def test_an_end_found_on_the_device_turns_the_row_into_padding(stop: int, max_len: int, flag: TokenFlag) -> None:
    e = Echo()
    e.slot(1, seq_len=10, last=7, serial=3, stop=stop, max_len=max_len)
    e.delta.patch(Field.DECODE_ROWS, 0, [1, abi.PAD, abi.PAD, abi.PAD])
    assert e.run("decode", 1) == [(1, 3, 8, flag)]
    before = e.buffers.slots.np.copy()
    assert e.run("decode", 1) == [(abi.PAD, 0, 0, 0)]
    assert (e.buffers.slots.np == before).all()


def test_prefill_samples_the_asked_rows_and_hands_over_to_decode() -> None:
    e = Echo()
    e.slot(0, seq_len=0, last=0, serial=1)
    e.slot(1, seq_len=4, last=0, serial=2)
    e.delta.patch(Field.PREFILL_TOKENS, 0, [5, 6, 7, 20, 21, 0, 0, 0])
    e.delta.patch(Field.PREFILL_POSITIONS, 0, [0, 1, 2, 4, 5, 0, 0, 0])
    e.delta.patch(Field.PREFILL_SLOTS, 0, [0, 0, 0, 1, 1, *[abi.PAD] * 3])
    e.delta.patch(Field.PREFILL_SAMPLES, 0, [2, abi.PAD])
    assert e.run("prefill", 8) == [(0, 1, 8, 0), (abi.PAD, 0, 0, 0)]
    e.delta.patch(Field.DECODE_ROWS, 0, [0, abi.PAD, abi.PAD, abi.PAD])
    assert e.run("decode", 1) == [(0, 1, 9, 0)]
    assert e.buffers.slots.np.view(abi.SLOT)["seq_len"][0, 0] == 4


def test_columns_are_the_rows() -> None:
    """For any number of leading rows, in every entry of the ring, with serials and tokens that need their 32nd bit."""
    rng = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 30)))
    print(f"seed {seed}")
    buffers = StepBuffers(NumpyOps(), SIZES, slots=3, max_blocks=5, vocab=VOCAB, caches={})
    reader = TokenReader(buffers.token_ring, buffers.logprob_ring, buffers.stamps)
    for step in range(1, 3 * RING_DEPTH):
        words = rng.integers(0, 1 << 32, (4, abi.TOKEN_WORDS), dtype=np.uint32)
        words[:, 0] = [0, 2, 0xFFFFFFFF, 1]
        entry = buffers.token_ring.np[step % RING_DEPTH]
        entry[abi.RECORD_HEADER :] = words.reshape(-1)
        entry[1], entry[0] = 4, step
        rows = reader.read(step, 1)
        assert [r.slot for r in rows] == [0, 2, abi.PAD, 1]
        for n in range(5):
            keys, tokens, flags = reader.columns(step, n)
            assert keys.tolist() == [(r.slot & 0xFFFFFFFF) | r.serial << 32 for r in rows[:n]]
            assert (tokens.tolist(), flags.tolist()) == ([r.token for r in rows[:n]], [r.flag for r in rows[:n]])


def test_a_step_without_its_record_is_an_error() -> None:
    e = Echo()
    with pytest.raises(RuntimeError, match="step 1 started without its delta record"):
        e.graphs["decode", 1].launch()


def test_a_record_too_full_is_an_error() -> None:
    e = Echo()
    room = e.buffers.delta.shape[1] - abi.RECORD_HEADER - abi.PATCH_HEADER
    e.delta.patch(Field.PREFILL_TOKENS, 0, [1] * room)
    with pytest.raises(ValueError, match=r"delta record of .* words is full: DECODE_ROWS wants 1 more"):
        e.delta.patch(Field.DECODE_ROWS, 0, [1])


def test_negative_words_survive() -> None:
    e = Echo()
    e.delta.patch(Field.PREFILL_SLOTS, 0, [-1, -2, 3])
    e.delta.patch(Field.PREFILL_SLOTS, 3, [-5])
    e.delta.patch(Field.DECODE_ROWS, 0, [abi.PAD] * 4)
    e.run("decode", 1)
    assert e.buffers.prefill_slots.np[:4].tolist() == [-1, -2, 3, -5]


def test_a_step_that_never_ends_is_reported() -> None:
    e = Echo()
    with pytest.raises(DeviceError, match=r"step 1 did not finish within 0\.01 s"):
        e.reader.read(1, 0.01)


def test_sizes_pad_up() -> None:
    assert [SIZES.padded("decode", n) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    with pytest.raises(ValueError, match="no prefill graph holds 9 rows"):
        SIZES.padded("prefill", 9)
    with pytest.raises(ConfigError, match="must be ascending"):
        StepSizes((2, 1), (4,), (4,), 1)


def test_views_of_all_sizes_share_memory() -> None:
    e = Echo()
    views = [e.buffers.view("decode", n) for n in (1, 4)] + [e.buffers.view("prefill", 8)]
    assert len({v.tokens.ptr for v in views}) == 1 and len({v.slots.ptr for v in views}) == 1
    assert [v.tokens.shape for v in views] == [(1,), (4,), (8,)]
