"""begin_step and commit_step beside the step's definition: random records of all kinds, padding, wrapping rings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from step_pair import StepPair, packed_slot

from graphrt.capture.step_buffers import StepSizes
from graphrt.kernels import abi
from graphrt.kernels.abi import Field, SlotState
from graphrt.kernels.cuda.begin_step import CONTROL_ERROR, CONTROL_FOUND, begin_step
from graphrt.kernels.cuda.commit_step import commit_step
from graphrt.kernels.cuda.driver import Driver
from graphrt.kernels.numpy_ops import NumpyOps

SIZES = StepSizes((1, 4, 300), (16, 700), (8,), 5)
SLOTS, BLOCKS, VOCAB = 310, 40, 1003


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def pair(driver: Driver, rng: np.random.Generator) -> StepPair:
    made = StepPair(driver, SIZES, slots=SLOTS, max_blocks=BLOCKS, vocab=VOCAB)
    made.fill("output_counts", rng.integers(0, 9, (SLOTS, VOCAB)))
    made.poison(rng, "tokens", "positions", "row_slot", "sample_rows", "targets", "token_ring")
    return made


def run(pair: StepPair, rng: np.random.Generator, kind: Any, rows: int) -> None:
    """One step, with random tokens in place of a model and a sampler."""
    device, host = pair.view(kind, rows)
    begin, commit = begin_step(device), commit_step(device)
    pair.driver.prepare([begin.spec, commit.spec])
    pair.publish()
    pair.driver.launch(begin)
    NumpyOps().begin_step(host)
    pair.assert_equal()
    pair.fill("next_tokens", rng.integers(0, 30, pair.host.next_tokens.shape))
    pair.driver.launch(commit)
    NumpyOps().commit_step(host)
    pair.assert_equal()


def join(pair: StepPair, rng: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    slots = rng.permutation(SLOTS)[:count]
    for slot in slots:
        pair.patch_slot(int(slot), packed_slot(rng, state=rng.integers(0, 3)))
        blocks = int(rng.integers(1, BLOCKS + 1))
        pair.patch(Field.BLOCK_TABLE, int(slot) * BLOCKS + BLOCKS - blocks, rng.integers(0, 99, blocks, dtype=np.int32))
    return slots


@pytest.mark.parametrize("rows", SIZES.decode)
def test_decode(pair: StepPair, rng: np.random.Generator, rows: int) -> None:
    slots = join(pair, rng, min(rows, 40))
    wanted = np.full(rows, abi.PAD, np.int32)
    wanted[rng.permutation(rows)[: len(slots)]] = slots
    pair.patch(Field.DECODE_ROWS, 0, wanted)
    run(pair, rng, "decode", rows)
    for _ in range(5):  # the rings wrap, sequences end, and nobody edits anything
        run(pair, rng, "decode", rows)
    pair.patch_slot(int(slots[0]), packed_slot(rng, fresh=1, state=SlotState.RUNNING))
    run(pair, rng, "decode", rows)


@pytest.mark.parametrize(("kind", "rows"), [("prefill", 16), ("prefill", 700), ("score", 8)])
def test_prefill_and_score(pair: StepPair, rng: np.random.Generator, kind: Any, rows: int) -> None:
    for _ in range(3):
        slots = join(pair, rng, 12)
        live = int(rng.integers(1, rows + 1))
        of_row = np.full(rows, abi.PAD, np.int32)
        of_row[:live] = np.sort(rng.choice(slots, live))
        pair.patch(Field.PREFILL_TOKENS, 0, rng.integers(0, VOCAB, rows, dtype=np.int32))
        pair.patch(Field.PREFILL_POSITIONS, 0, rng.integers(0, 90, rows, dtype=np.int32))
        pair.patch(Field.PREFILL_SLOTS, 0, of_row)
        # One sampled row of a slot at most, as the scheduler has it.
        last = np.flatnonzero(np.append(of_row[1:] != of_row[:-1], True))
        samples = SIZES.samples(kind, rows)
        picked = np.full(samples, abi.PAD, np.int32)
        picked[: len(last)] = last[:samples]
        picked[rng.integers(samples)] = rows - 1  # perhaps a padding row
        _, first = np.unique(picked, return_index=True)
        picked[np.setdiff1d(np.arange(samples), first)] = abi.PAD
        pair.patch(Field.PREFILL_SAMPLES, 0, picked)
        pair.patch(Field.SCORE_TARGETS, 0, rng.integers(-1, VOCAB, samples, dtype=np.int32))
        run(pair, rng, kind, rows)


def test_patches_of_every_field_in_their_order(pair: StepPair, rng: np.random.Generator) -> None:
    """Thousands of words, small and large, one over another: later ones win, and records pass the kernel's windows."""
    names = [f.name.lower() for f in Field]
    for _ in range(6):
        for _ in range(int(rng.integers(1, 120))):
            field = Field(int(rng.integers(1, len(names))))  # slots have tests of their own
            size = int(np.prod(getattr(pair.host, names[field]).shape))
            count = min(int(rng.choice([0, 1, 2, 3, 31, 300, 5000])), size)
            offset = int(rng.integers(0, size - count + 1)) if rng.integers(2) else 0
            low, high = (abi.PAD, 16) if "prefill" in names[field] or "rows" in names[field] else (0, 1 << 30)
            pair.patch(field, offset, rng.integers(low, high, count, dtype=np.int32))
        device, host = pair.view("decode", 4)
        call = begin_step(device)
        pair.driver.prepare([call.spec])
        pair.fill("decode_rows", np.full(pair.host.decode_rows.shape, abi.PAD))
        pair.publish()
        pair.driver.launch(call)
        NumpyOps().begin_step(host)
        pair.assert_equal()
        NumpyOps().commit_step(host)
        pair.driver.launch(commit_step(device))


def test_fresh_slots_are_cleared_and_no_others(driver: Driver, rng: np.random.Generator) -> None:
    for vocab in (1, 3, 31, 128256 // 8 + 1):
        pair = StepPair(driver, StepSizes((2,), (4,), (4,), 2), slots=7, max_blocks=3, vocab=vocab)
        pair.fill("output_counts", rng.integers(1, 9, (7, vocab)))
        for slot in (0, 3, 6):
            pair.patch_slot(slot, packed_slot(rng, fresh=int(slot != 3)))
        pair.patch(Field.DECODE_ROWS, 0, [3, abi.PAD])
        pair.publish()
        device, host = pair.view("decode", 2)
        call = begin_step(device)
        driver.prepare([call.spec])
        driver.launch(call)
        NumpyOps().begin_step(host)
        pair.assert_equal("output_counts", "slots")
        counts = driver.download(pair.device.output_counts)
        assert (counts[[0, 6]] == 0).all() and (counts[[1, 2, 3, 4, 5]] > 0).all()


@pytest.mark.parametrize(("kind", "rows"), [("decode", 4), ("prefill", 16), ("score", 8)])
def test_a_step_without_its_record_is_all_padding(
    pair: StepPair, rng: np.random.Generator, kind: Any, rows: int
) -> None:
    device, _ = pair.view(kind, rows)
    calls = [begin_step(device), commit_step(device)]
    driver = pair.driver
    driver.prepare([c.spec for c in calls])
    pair.device.delta.np[1, 0] = 77
    before = {name: driver.download(getattr(pair.device, name)) for name in ("slots", "output_counts", "block_table")}
    for call in calls:
        driver.launch(call)
    control = driver.download(pair.device.control)
    assert control.tolist() == [1, 1, 77, 0] and (CONTROL_ERROR, CONTROL_FOUND) == (1, 2)
    assert (driver.download(device.row_slot) == abi.PAD).all() and (
        driver.download(device.sample_rows) == abi.PAD
    ).all()
    assert (driver.download(device.tokens) == 0).all() and (driver.download(device.positions) == 0).all()
    entry = pair.device.token_ring.np[1]
    rows_out = entry[abi.RECORD_HEADER :][: 4 * device.samples].reshape(-1, 4).view(np.int32)
    assert entry[:2].tolist() == [1, device.samples] and (rows_out == [abi.PAD, 0, 0, 0]).all()
    for name, values in before.items():
        np.testing.assert_array_equal(driver.download(getattr(pair.device, name)), values)


def test_step_numbers_wrap(pair: StepPair, rng: np.random.Generator) -> None:
    start = 0xFFFFFFFD
    for delta in pair.deltas:
        delta.step = start
    pair.fill("control", np.array([start, 0, 0, 0], np.uint32))
    pair.patch_slot(5, packed_slot(rng, max_len=1000, num_stop_ids=0))
    pair.patch(Field.DECODE_ROWS, 0, [5])
    for _ in range(5):
        run(pair, rng, "decode", 1)
    assert driver_word(pair) == 2


def driver_word(pair: StepPair) -> int:
    return int(pair.driver.download(pair.device.control)[0])


def test_replays_of_a_captured_pair(pair: StepPair, rng: np.random.Generator) -> None:
    """Nothing but the rings changes between replays; two are queued before the first is read."""
    device, host = pair.view("decode", 4)
    calls = [begin_step(device), commit_step(device)]
    pair.driver.prepare([c.spec for c in calls])
    graph = pair.driver.capture(lambda: [pair.driver.launch(c) for c in calls])  # type: ignore[func-returns-value]
    assert (graph.nodes, graph.programmatic_edges) == (2, 1)
    pair.fill("next_tokens", np.full(pair.host.next_tokens.shape, 29))
    pair.patch_slot(1, packed_slot(rng, max_len=40, seq_len=20, num_stop_ids=0))
    pair.patch_slot(2, packed_slot(rng, max_len=23, seq_len=18, num_stop_ids=0))
    pair.patch(Field.DECODE_ROWS, 0, [1, abi.PAD, 2, abi.PAD])
    for _ in range(30):
        for _ in range(2):
            pair.publish()
            graph.launch()
            NumpyOps().begin_step(host)
            NumpyOps().commit_step(host)
        pair.driver.synchronize()
        pair.assert_equal()
