"""A device that is as late as it may be, and the books that an engine must keep meanwhile."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from graphrt.capture.graph import StepGraph
from graphrt.engine import Engine
from graphrt.kernels.step_state import StepKind
from graphrt.sequence import NO_SLOT


class LateDevice:
    """Stands between an engine and its graphs."""

    def __init__(self, engine: Engine, rng: np.random.Generator, promptness: float) -> None:
        self._graphs, self._wait, self._ready = engine.graphs, engine.reader.wait, engine.reader.ready
        self.buffers, self.rng, self.promptness = engine.graphs.buffers, rng, promptness
        self.queue: deque[StepGraph] = deque()
        engine.graphs, engine.reader.wait = self, self.wait  # type: ignore[assignment, method-assign]

    def __getitem__(self, key: tuple[StepKind, int]) -> LateDevice:
        self.queue.append(self._graphs[key])
        return self

    @property
    def eager_launches(self) -> int:
        return self._graphs.eager_launches

    def launch(self) -> None:
        while self.queue and self.rng.random() < self.promptness:
            self.queue.popleft().launch()

    def wait(self, step: int, timeout_s: float) -> None:
        while not self._ready(step):
            self.queue.popleft().launch()
        self._wait(step, timeout_s)


def check_books(engine: Engine) -> None:
    """Every slot and block is held as often as the books say, by one sequence unless it was published; what a launched step
    may write is held, and what is published is there."""
    s = engine.scheduler
    pool = s.pool
    holders = set(s._by_id.values()) | {seq for plan in engine.in_flight for seq in plan.seqs}
    references = Counter(block for seq in holders for block in seq.blocks)
    assert [references[b] for b in range(pool.num_blocks)] == pool._references
    assert all(pool._hash_of[b] is not None for b, n in references.items() if n > 1)
    assert sorted([q.slot for q in holders if q.slot != NO_SLOT] + s._free_slots) == list(range(s.num_slots))
    for seq in s._by_id.values():
        places = (seq in s.waiting) + (seq in s.prefilling) + (seq in s.rows)
        assert places == 1 or (places == 0 and seq.last_step > s.retired), (
            "a live sequence waits, runs, or has its last step to come"
        )
        assert seq.slot == NO_SLOT or s.decoding.computed(seq) <= len(seq.blocks) * s.block_tokens
    for plan in engine.in_flight:
        assert all(seq.slot != NO_SLOT and seq.blocks for seq in plan.seqs), "freed before the step retired"
    published = engine.graphs.buffers.caches["kv"].np[list(pool._block_of.values())]
    assert not np.isnan(published).any(), "published before the step retired"
    assert [seq.row for seq in s.rows] == list(range(len(s.rows)))
    entries = [(due, seq) for due, seqs in s.decoding._calendar.items() for seq in seqs]
    assert {id(seq) for _, seq in entries} == {id(seq) for seq in s.rows} and len(entries) == len(s.rows)
    for due, seq in entries:
        assert due == seq.due >= s.decoding.steps
        end = min(len(seq.blocks) * s.block_tokens, seq.max_len - 1)
        assert s.decoding.computed(seq) + due - s.decoding.steps == end, (
            "a row is looked at when it must be, and not before"
        )
    assert all(seq.blocks for seq in s._prefixes._noted), "given back before it was published"
