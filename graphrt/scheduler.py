"""Which sequences take part in the next step, and what becomes of those that a step has ended.

The one clever thing: nothing here waits for tokens. A step is planned from how many tokens each sequence *will* have; what the device found
out meanwhile (a stop id) turns the row into padding there, and the host learns it when the step retires. A slot and its blocks are
free again only when the last launched step that could touch them has retired.
"""

from __future__ import annotations

import time
from collections import deque
from operator import attrgetter

from graphrt.block_pool import BlockPool
from graphrt.capture.delta import DeltaWriter
from graphrt.capture.step_buffers import StepSizes
from graphrt.capture.token_ring import TokenReader
from graphrt.decode_rows import DecodeRows
from graphrt.kernels.abi import Field
from graphrt.prefixes import Prefixes
from graphrt.prompt_steps import PromptSteps
from graphrt.queue_times import QueueTimes
from graphrt.retire import retire_decode, retire_prompt
from graphrt.seam.records import Output, TokenOut
from graphrt.sequence import NO_SLOT, Sequence
from graphrt.step_plan import StepPlan

_by_age = attrgetter("serial")


class Scheduler:
    """Continuous batching over fixed step sizes, chunked prefill, preemption by recomputation."""

    def __init__(
        self,
        delta: DeltaWriter,
        pool: BlockPool,
        sizes: StepSizes,
        *,
        slots: int,
        max_blocks: int,
        block_tokens: int,
        vocab: int,
        reuse_prefixes: bool,
    ) -> None:
        self.delta, self.pool, self.sizes, self.vocab = delta, pool, sizes, vocab
        self.num_slots, self.max_blocks, self.block_tokens = slots, max_blocks, block_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding = DecodeRows(delta, sizes, max_blocks=max_blocks, block_tokens=block_tokens)
        self.launched = self.retired = 0  # steps
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self.queue_times = QueueTimes()
        self._prompts = PromptSteps(delta, sizes)
        self._prefixes = Prefixes(pool, block_tokens, reuse_prefixes)
        self._free_slots = list(range(slots - 1, -1, -1))
        self._by_id: dict[int, Sequence] = {}
        self._serial = 0
        self._prefilled_last = False
        self._short = False  # of blocks for the first that waits, and nothing was given back since
        self._leaving: list[Sequence] = []  # finished, but a launched step may still write to their blocks
        self._finished_at = 0  # steps up to this one may hold rows of finished sequences

    # -- what comes from outside --------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Sequence]:
        """The sequences that decode, by row."""
        return self.decoding.rows

    @property
    def steps_in_flight(self) -> int:
        """Steps that were launched and have not retired."""
        return self.launched - self.retired

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do and nothing in flight."""
        return not (self._by_id or self.steps_in_flight)

    @property
    def slots_used(self) -> int:
        """Slots that a sequence holds."""
        return self.num_slots - len(self._free_slots)

    @property
    def live(self) -> list[int]:
        """Ids of all requests that have not finished."""
        return list(self._by_id)

    def add(self, seq: Sequence) -> None:
        """Queue a request. ValueError when its id is in use."""
        if seq.id in self._by_id:
            raise ValueError(f"request id {seq.id} is in use")
        self._by_id[seq.id] = seq
        self.waiting.append(seq)

    def cancel(self, request_id: int) -> list[TokenOut]:
        """Drop a request; empty when there is none of this id."""
        if (seq := self._by_id.get(request_id)) is None:
            return []
        self._end(seq, "cancelled")
        return [TokenOut(seq.id, [], "cancelled", seq.cached_tokens)]

    # -- the next step ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, its edits written to the delta record; None when there is nothing to launch before a step retires."""
        decoding = self.decoding
        if decoding.due:
            self._drop_done()
        if self.waiting and self._free_slots:
            self._admit()
        plan = None
        if self.prefilling and not (decoding.rows and self._prefilled_last):
            plan = self._prompt_step()
        elif decoding.rows and (decoding.due is None or self._grow()):
            plan = decoding.launch(self.launched + 1) if decoding.rows else self._prompt_step()
        if plan is not None:
            self._prefilled_last = plan.group is None
            self.launched = plan.number
        return plan

    def _prompt_step(self) -> StepPlan:
        plan, done = self._prompts.plan(self.prefilling, self.launched + 1)
        for seq in done:
            self.prefilling.remove(seq)
            self.decoding.join(seq)
        return plan

    def publish(self) -> None:
        """Offer full blocks to those to come. Nobody waits for it."""
        if self._prefixes.publish():
            self._short = False

    def prepare(self) -> None:
        """Do what the next `plan` would have to do anyway: for the time in which a launched step is awaited."""
        self.publish()
        if self.decoding.due and not (self.waiting and self._free_slots):  # a newcomer's share would be counted first
            self._drop_done()
            self._grow()

    def _drop_done(self) -> None:
        for seq in [seq for seq in self.decoding.due or () if self.decoding.done(seq)]:
            self.decoding.leave(seq)
            self._short = False

    def _admit(self) -> None:
        self.publish()
        while self.waiting and self._free_slots and not self._short:
            length = len((seq := self.waiting[0]).tokens)
            blocks = self._prefixes.find(seq)
            hits = len(blocks) * self.block_tokens
            need = -(-length // self.block_tokens) - len(blocks)
            # One spare block for every row that runs, lest the newcomer be preempted at once.
            spare = len(self.decoding) + len(self.prefilling)
            if need + spare > self.pool.available:
                self.pool.release(blocks)
                self._short = True
                return
            self.waiting.popleft()
            blocks += self.pool.allocate(need)
            self._serial = (self._serial + 1) & 0xFFFFFFFF
            seq.serial, seq.slot, seq.blocks = self._serial, self._free_slots.pop(), blocks
            seq.computed = seq.retired = hits
            seq.published, seq.prefill_end = hits // self.block_tokens, length
            if not seq.admitted_before:
                seq.admitted_before, seq.cached_tokens = True, hits
                self.queue_times.add(time.monotonic() - seq.arrived)
                self.prefix_queries += length
                self.prefix_hits += hits
            seq.install(self.delta, self.vocab)
            self.delta.patch(Field.BLOCK_TABLE, seq.slot * self.max_blocks, blocks)
            self.prefilling.append(seq)

    def _grow(self) -> bool:
        """A block for each row that has filled its own; False when that has to wait for the steps in flight."""
        for seq in sorted(self.decoding.due or (), key=_by_age):
            while self.pool.available == 0 and seq.row >= 0:
                if self.steps_in_flight:
                    return False  # they may still write to what would be taken away
                self._preempt(max(self.decoding.rows + self.prefilling, key=_by_age))
            if seq.row >= 0:  # else it was preempted, here or for an older one
                self.decoding.grow(seq, self.pool.allocate(1)[0])
        return True

    # -- a step has retired -------------------------------------------------------------------------------------------

    def retire(self, plan: StepPlan, reader: TokenReader) -> Output:
        """Take in what the oldest launched step produced; `reader` holds its record."""
        self.retired = plan.number
        if plan.group is None:
            output, ends = retire_prompt(plan, reader)
            for part in plan.parts:
                if not part.seq.finish:
                    self._prefixes.note(part.seq)
        else:
            output, ends = retire_decode(plan, reader, plan.number <= self._finished_at)
            for seq in plan.full:
                if not seq.finish:
                    seq.retired = len(seq.tokens) - 1
                    self._prefixes.note(seq)
        for seq, reason in ends:
            self._end(seq, reason)
        if self._leaving:
            for seq in [seq for seq in self._leaving if seq.last_step <= self.retired]:
                self._leaving.remove(seq)
                self._release(seq)
        return output

    # -- leaving ------------------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, reason: str) -> None:
        self.publish()
        seq.finish = reason
        del self._by_id[seq.id]
        self._short = False
        if seq.slot == NO_SLOT:
            self.waiting.remove(seq)
            return
        self._leave(seq)
        if seq.last_step <= self.retired:
            self._release(seq)
        else:
            self._leaving.append(seq)
            self._finished_at = self.launched

    def _leave(self, seq: Sequence) -> None:
        """Take no part in further steps."""
        if seq.row >= 0:
            self.decoding.leave(seq)
        elif seq in self.prefilling:
            self.prefilling.remove(seq)

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        self._free_slots.append(seq.slot)
        seq.blocks, seq.slot = [], NO_SLOT
        self._short = False

    def _preempt(self, seq: Sequence) -> None:
        """Give back all it holds; it starts again from its tokens, which gives the same continuation."""
        if len(self.decoding) + len(self.prefilling) == 1:
            raise RuntimeError(f"request {seq.id} alone does not fit into {self.pool.num_blocks} blocks")
        self.publish()
        self._leave(seq)
        self._release(seq)
        seq.computed = seq.retired = seq.published = 0
        self.waiting.appendleft(seq)
        self.preemptions += 1
