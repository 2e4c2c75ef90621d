"""What is remembered from step to step about the rows that decode: right in every order in which they change, and made only then."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_script import GREEDY, Script, nothing_left, run_alone, settle
from late_device import LateDevice, check_books

from graphrt.capture.delta import DeltaWriter
from graphrt.capture.step_buffers import StepBuffers, StepSizes
from graphrt.decode_rows import DecodeRows
from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.kernels import abi
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.numpy_step import apply_patches
from graphrt.seam.records import Cancel, Submit
from graphrt.sequence import Sequence

BLOCK = 4
SLOTS = 6


@pytest.fixture(scope="module")
def make_engine(tiny_model: Callable[..., Path]) -> Callable[..., Engine]:
    model = tiny_model("llama", head_dim=16, layers=1, dtype="bf16")

    def make(*, blocks: int = 0, **config: Any) -> Engine:
        if blocks:
            whole = make(max_batch=1)
            config["kv_bytes"] = whole.graphs.buffers.caches["kv"].nbytes // whole.info.num_blocks * blocks
        settings: dict[str, Any] = {"context": 64, "prefill_chunk": 8, "block_tokens": BLOCK} | config
        return build_engine(EngineConfig(str(model), **settings))

    return make


class Rows:
    """`DecodeRows` beside the plainest account of what they should be."""

    def __init__(self) -> None:
        sizes = StepSizes((1, 2, SLOTS), (8,), (8,), 1)
        self.buffers = StepBuffers(NumpyOps(), sizes, slots=SLOTS, max_blocks=40, vocab=8, caches={})
        self.delta = DeltaWriter(self.buffers.delta)
        self.rows = DecodeRows(self.delta, sizes, max_blocks=40, block_tokens=BLOCK)
        self.lengths: dict[Sequence, int] = {}
        self.steps = self.blocks = 0

    def join(self, rng: np.random.Generator) -> None:
        computed = int(rng.integers(1, 12))
        seq = Sequence(Submit(self.blocks, [1], GREEDY, 1, []), [1], computed + int(rng.integers(1, 20)), b"")
        seq.computed, seq.slot = computed, min(set(range(SLOTS)) - {s.slot for s in self.lengths})
        seq.blocks = [self.block() for _ in range(-(-computed // BLOCK))]
        self.delta.patch(abi.Field.BLOCK_TABLE, seq.slot * 40, seq.blocks)
        self.rows.join(seq)
        if computed < seq.max_len - 1:
            self.lengths[seq] = computed
        else:
            assert seq.row == -1, "its last token is already on its way"

    def leave(self, seq: Sequence) -> None:
        self.rows.leave(seq)
        assert seq.computed == self.lengths.pop(seq) and seq.row == -1

    def block(self) -> int:
        self.blocks += 1
        return self.blocks

    def step(self) -> None:
        due = {seq for seq, n in self.lengths.items() if n == len(seq.blocks) * BLOCK or n >= seq.max_len - 1}
        assert set(self.rows.due or ()) == due
        for seq in due:
            assert self.rows.done(seq) == (self.lengths[seq] >= seq.max_len - 1)
            if self.rows.done(seq):
                self.leave(seq)
            else:
                self.rows.grow(seq, self.block())
        assert not self.rows.due
        if not self.lengths:
            return
        self.steps += 1
        plan = self.rows.launch(self.steps)
        for seq in self.lengths:
            self.lengths[seq] += 1
        apply_patches(self.buffers.delta.np[self.delta.publish() % 4], self.buffers.view("decode", plan.size))
        assert plan.group is not None and set(plan.group.seqs) == set(self.lengths)
        full = {seq for seq, n in self.lengths.items() if n == len(seq.blocks) * BLOCK or n == seq.max_len - 1}
        assert set(plan.full) == full and plan.rows == len(self.lengths) <= plan.size
        wanted = [seq.slot for seq in plan.group.seqs]
        assert self.buffers.decode_rows.np.tolist() == wanted + [abi.PAD] * (SLOTS - len(wanted))
        for seq in self.lengths:
            assert self.rows.computed(seq) == self.lengths[seq]
            assert self.buffers.block_table.np[seq.slot, : len(seq.blocks)].tolist() == seq.blocks


def test_rows_are_due_exactly_when_a_plain_count_says_so() -> None:
    rng = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 30)))
    print(f"seed {seed}")
    model, grown, steps = Rows(), 0, 0
    while steps < 2000:
        before = model.blocks
        if len(model.lengths) < SLOTS and rng.random() < 0.3:
            model.join(rng)
        elif model.lengths and rng.random() < 0.1:
            model.leave(list(model.lengths)[int(rng.integers(len(model.lengths)))])
        else:
            before = model.blocks
            model.step()
            steps, grown = steps + 1, grown + model.blocks - before
    assert grown > 200


def test_the_group_is_gathered_only_when_somebody_came_or_went(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=4, run_ahead=1), Script()
    LateDevice(engine, np.random.default_rng(), 0.0)
    script.inbox += [Submit(1, [1, 2, 3], GREEDY, 30, []), Submit(2, [4], GREEDY, 40, [])]

    def groups(turns: int) -> Iterator[Any]:
        for _ in range(turns):
            engine.step(script)
            yield engine.in_flight[-1].group

    *_, first = groups(3)
    assert first is not None and all(group is first for group in groups(12)), "block borders change no group"
    script.inbox.append(Submit(3, [5], GREEDY, 40, []))
    kinds = [group for group in groups(8) if group is not first]
    assert kinds[0] is None and len({id(g) for g in kinds[1:]}) == 1, "a prompt's step, then one new group"
    assert set(kinds[1].ids) == {1, 2, 3}
    script.inbox.append(Cancel(2))
    after = list(groups(6))
    assert len({id(g) for g in after}) == 1 and set(after[0].ids) == {1, 3}
    assert set(kinds[1].ids) == {1, 2, 3}, "what was launched keeps its own"
    settle(engine, script)
    nothing_left(engine)


def calls_of_a_step(engine: Engine, script: Script) -> int:
    """Python functions that one turn of the loop calls."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and "graphrt" in frame.f_code.co_filename and "kernels" not in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        engine.step(script)
    finally:
        sys.setprofile(None)
    return count


def test_a_step_makes_as_many_calls_for_many_rows_as_for_one(make_engine: Callable[..., Engine]) -> None:
    counts = {}
    for batch in (1, 16):
        engine, script = make_engine(max_batch=batch, run_ahead=1, block_tokens=64, context=128), Script()
        script.inbox += [Submit(i, [1, 2, i], GREEDY, 50, []) for i in range(batch)]
        while len(engine.scheduler.rows) < batch:
            engine.step(script)
        for _ in range(5):
            engine.step(script)
        counts[batch] = [calls_of_a_step(engine, script) for _ in range(20)]
    assert counts[1] == counts[16] and max(counts[1]) < 40, counts


def test_what_a_wait_has_time_for_is_not_done_afterwards(make_engine: Callable[..., Engine]) -> None:
    engine, script = make_engine(max_batch=3, run_ahead=1), Script()
    LateDevice(engine, np.random.default_rng(), 0.0)
    rng = np.random.default_rng()
    prompts = [rng.integers(0, 320, n).tolist() for n in (6, 7, 9)]
    script.inbox += [Submit(i, p, GREEDY, 40, []) for i, p in enumerate(prompts)]
    plan, seen = engine.scheduler.plan, []
    engine.scheduler.plan = lambda: (seen.append(engine.scheduler.decoding.due), plan())[1]  # type: ignore[method-assign]
    for _ in range(30):
        engine.step(script)
        check_books(engine)
    assert seen[4:] == [None] * 26, "no step is planned with a row that is due"
    running = engine.scheduler.rows[0]
    assert running.published * BLOCK > running.prompt_len, "full blocks are in the index while their request runs"
    # A request that comes now finds what has been said so far.
    told = prompts[0] + script.tokens[0]
    script.inbox.append(Submit(9, [*told, 1], GREEDY, 2, []))
    settle(engine, script)
    assert len(told) - BLOCK <= script.cached[9] <= len(told)
    nothing_left(engine)


def test_blocks_are_published_before_their_request_gives_them_back(make_engine: Callable[..., Engine]) -> None:
    """A request that is cancelled or ends in the very turn in which its block is full leaves it to the next one."""
    for end in ("cancel", "length"):
        for tokens in range(1, 10):
            engine, script = make_engine(max_batch=1, run_ahead=0), Script()
            script.inbox.append(Submit(1, [5, 6, 7], GREEDY, 40 if end == "cancel" else tokens, []))
            while len(script.tokens[1]) < tokens:
                engine.step(script)
            if end == "cancel":
                script.inbox.append(Cancel(1))
            settle(engine, script)
            nothing_left(engine)
            known = [5, 6, 7, *script.tokens[1]]
            script.inbox.append(Submit(2, [*known, 1], GREEDY, 1, []))
            settle(engine, script)
            assert script.cached[2] == (len(known) - 1) // BLOCK * BLOCK, "the last token's keys were never computed"


EVENTS = ("join", "cancel", "end", "stop", "border")


@pytest.fixture(scope="module")
def stopping(make_engine: Callable[..., Engine]) -> tuple[list[int], list[int]]:
    """A prompt, and its greedy answer of 40 tokens."""
    engine = make_engine()
    rng = np.random.default_rng()
    for _ in range(200):
        prompt = rng.integers(0, 320, 3).tolist()
        answer = run_alone(engine, Submit(1, prompt, GREEDY, 40, [])).tokens[1]
        if all(answer.index(t) == i for i, t in enumerate(answer[:16])):
            return prompt, answer
    pytest.fail("no answer without repetitions")


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_events_in_every_order(
    make_engine: Callable[..., Engine], stopping: tuple[list[int], list[int]], run_ahead: int
) -> None:
    """One request joins, one is cancelled, one reaches its length, one its stop id, one a block border, in consecutive steps of
    every order, with blocks for not all of them; what each says is what it says alone."""
    prompt, answer = stopping
    alone_engine, alone, preemptions = make_engine(max_batch=1), {}, 0
    for order in itertools.permutations(EVENTS):
        at = {event: 6 + i for i, event in enumerate(order)}  # tokens after which it happens
        engine, script = make_engine(max_batch=6, run_ahead=run_ahead, blocks=17, prefill_chunk=64), Script()
        device = LateDevice(engine, np.random.default_rng(), 0.0)
        todo = {
            1: Submit(1, [9] * (4 * BLOCK - at["border"]), GREEDY, 40, []),  # computed tokens meet the border then
            2: Submit(2, [11, 12], GREEDY, 40, []),
            3: Submit(3, [13], GREEDY, at["end"], []),
            4: Submit(4, prompt, GREEDY, 40, [answer[at["stop"] - 1]]),
        }
        late = Submit(5, [17] * 5, GREEDY, 40, [])
        script.inbox += todo.values()
        said = Counter[str]()
        for _ in range(400):
            busy = engine.step(script)
            check_books(engine)
            engine.graphs.buffers.caches["kv"].np[engine.scheduler.pool._free] = np.nan
            tokens = len(script.tokens[1])
            if tokens >= at["join"] and not said["join"]:
                script.inbox.append(late)
                said["join"] += 1
            if tokens >= at["cancel"] and not said["cancel"]:
                script.inbox.append(Cancel(2))
                said["cancel"] += 1
            if not busy and not script.inbox:
                break
        assert not device.queue
        nothing_left(engine)
        preemptions += engine.scheduler.preemptions
        for r in [*todo.values(), late]:
            key = (tuple(r.tokens), r.max_tokens, *r.stop_ids)
            if key not in alone:
                alone[key] = run_alone(alone_engine, Submit(1, r.tokens, GREEDY, r.max_tokens, r.stop_ids))
            want = alone[key]
            if r.id == 2:
                assert script.finish[2] == "cancelled" and script.tokens[2] == want.tokens[1][: len(script.tokens[2])]
            else:
                assert (script.tokens[r.id], script.finish[r.id]) == (want.tokens[1], want.finish[1]), order
        assert script.finish[4] == "stop" and len(script.tokens[4]) == at["stop"]
        assert script.finish[3] == "length" and len(script.tokens[3]) == at["end"]
    assert preemptions > 0
