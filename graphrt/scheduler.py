"""Which sequences take part in the next step, and the edits that tell the step so.

The one clever thing: nothing here waits for tokens. A step is planned from how many tokens each sequence *will* have; what the device found
out meanwhile (a stop id) turns the row into padding there, and the host learns it when the step retires. A slot and its blocks are
free again only when the last launched step that could touch them has retired.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from graphrt.block_pool import BlockPool
from graphrt.capture.delta import DeltaWriter
from graphrt.capture.step_buffers import StepSizes
from graphrt.capture.token_ring import TokenReader, TokenRow
from graphrt.kernels import abi
from graphrt.kernels.abi import Field, TokenFlag
from graphrt.kernels.step_state import StepKind
from graphrt.queue_times import QueueTimes
from graphrt.seam.records import NO_LOGPROBS, Logprob, TokenOut
from graphrt.sequence import NO_SLOT, Sequence

Ints = list[int] | range
FINISH = {TokenFlag.STOP: "stop", TokenFlag.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's share of a step: `count` tokens, which sample of the step is its next token (-1: none), and whether samples
    0 .. count - 1 score its prompt."""

    seq: Sequence
    count: int
    sample: int
    scored: bool = False


@dataclass(slots=True)
class StepPlan:
    """One launched step, until it retires."""

    kind: StepKind
    size: int
    parts: list[Part]
    step: int = 0


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
        self.max_blocks, self.block_tokens, self.reuse_prefixes = max_blocks, block_tokens, reuse_prefixes
        self.num_slots = slots
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.rows: list[Sequence] = []  # by decode row
        self.steps_in_flight = 0
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self.queue_times = QueueTimes()
        self._free_slots = list(range(slots - 1, -1, -1))
        self._by_id: dict[int, Sequence] = {}
        self._serial = 0
        self._prefilled_last = False
        delta.patch(Field.DECODE_ROWS, 0, [abi.PAD] * sizes.decode[-1])

    # -- what comes from outside --------------------------------------------------------------------------------------

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
        seq = self._by_id.get(request_id)
        if seq is None:
            return []
        self._end(seq, "cancelled")
        return [TokenOut(seq.id, [], "cancelled", seq.cached_tokens)]

    # -- the next step ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, its edits written to the delta record; None when there is nothing to launch before a step retires."""
        for seq in [s for s in self.rows if s.computed >= s.max_len - 1]:
            self._drop_row(seq)  # the last launched step samples its last token
        self._admit()
        plan = None
        if self.prefilling and not (self.rows and self._prefilled_last):
            plan = self._plan_score() if self.prefilling[0].scoring else self._plan_prefill()
        elif self.rows:
            plan = self._plan_decode()
        if plan is not None:
            self._prefilled_last = plan.kind != "decode"
            self.steps_in_flight += 1
            for part in plan.parts:
                part.seq.in_flight += 1
        return plan

    def _admit(self) -> None:
        while self.waiting and self._free_slots:
            seq = self.waiting[0]
            length = len(seq.tokens)
            blocks: list[int] = []
            if self.reuse_prefixes:
                seq.extend_hashes(self.block_tokens, length - 1)
                blocks = self.pool.match(seq.hashes[: seq.reusable // self.block_tokens])
            hits = len(blocks) * self.block_tokens
            need = -(-length // self.block_tokens) - len(blocks)
            # One spare block for every row that runs, lest the newcomer be preempted at once.
            spare = len(self.rows) + len(self.prefilling)
            if need + spare > self.pool.available:
                self.pool.release(blocks)
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

    def _plan_prefill(self) -> StepPlan:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        samples: list[int] = []
        parts = []
        room = self.sizes.prefill[-1]
        for seq in list(self.prefilling):
            count = min(room - len(tokens), seq.prefill_end - seq.computed)
            last = seq.computed + count == seq.prefill_end
            if count == 0 or seq.scoring or (last and len(samples) == self.sizes.prefill_samples):
                break
            tokens += seq.tokens[seq.computed : seq.computed + count]
            positions += range(seq.computed, seq.computed + count)
            slots += [seq.slot] * count
            seq.computed += count
            parts.append(Part(seq, count, len(samples) if last else -1))
            if last:
                samples.append(len(tokens) - 1)
                self.prefilling.remove(seq)
                self._add_row(seq)
        size = self._patch_rows("prefill", tokens, positions, slots, samples)
        return StepPlan("prefill", size, parts)

    def _plan_score(self) -> StepPlan:
        """A chunk of one prompt whose tokens all want their log-probabilities."""
        seq = self.prefilling[0]
        start = seq.computed
        count = min(self.sizes.score[-1], seq.prefill_end - start)
        seq.computed += count
        last = seq.computed == seq.prefill_end
        targets = seq.tokens[start + 1 : start + 1 + count] + [abi.PAD] * last
        rows = list(range(count))
        size = self._patch_rows(
            "score", seq.tokens[start : seq.computed], range(start, seq.computed), [seq.slot] * count, rows
        )
        self.delta.patch(Field.SCORE_TARGETS, 0, targets)
        if last:
            self.prefilling.remove(seq)
            self._add_row(seq)
        return StepPlan("score", size, [Part(seq, count, count - 1 if last else -1, scored=True)])

    def _patch_rows(self, kind: StepKind, tokens: Ints, positions: Ints, slots: Ints, samples: Ints) -> int:
        """Describe the rows of a step over prompt tokens, padded to a size that has a graph; the size."""
        size = self.sizes.padded(kind, len(tokens))
        padding = size - len(tokens)
        self.delta.patch(Field.PREFILL_TOKENS, 0, [*tokens, *[0] * padding])
        self.delta.patch(Field.PREFILL_POSITIONS, 0, [*positions, *[0] * padding])
        self.delta.patch(Field.PREFILL_SLOTS, 0, [*slots, *[abi.PAD] * padding])
        unused = self.sizes.samples(kind, size) - len(samples)
        self.delta.patch(Field.PREFILL_SAMPLES, 0, [*samples, *[abi.PAD] * unused])
        return size

    def _plan_decode(self) -> StepPlan | None:
        for seq in sorted(self.rows, key=lambda s: s.serial):
            if seq.slot == NO_SLOT:
                continue  # preempted by an older one
            need = seq.computed // self.block_tokens + 1 - len(seq.blocks)
            while need > self.pool.available and seq.slot != NO_SLOT:
                if self.steps_in_flight:
                    return None  # steps in flight may still write to what would be taken away
                self._preempt(max(self.rows + self.prefilling, key=lambda s: s.serial))
            if need > 0 and seq.slot != NO_SLOT:
                self.delta.patch(
                    Field.BLOCK_TABLE, seq.slot * self.max_blocks + len(seq.blocks), blocks := self.pool.allocate(need)
                )
                seq.blocks += blocks
        parts = [Part(seq, 1, row) for row, seq in enumerate(self.rows)]
        size = self.sizes.padded("decode", len(parts))
        for seq in self.rows:
            seq.computed += 1
        return StepPlan("decode", size, parts)

    # -- a step has retired -------------------------------------------------------------------------------------------

    def retire(self, plan: StepPlan, rows: list[TokenRow], reader: TokenReader) -> list[TokenOut]:
        """Take in what a step produced; `reader` still holds its log-probabilities."""
        self.steps_in_flight -= 1
        out = []
        for part in plan.parts:
            seq = part.seq
            seq.in_flight -= 1
            if seq.finish:
                if seq.in_flight == 0:
                    self._release(seq)
                continue
            seq.retired += part.count
            scores = self._take_scores(seq, plan.step, rows, part, reader) if part.scored else []
            if part.sample >= 0:
                row = rows[part.sample]
                if row.slot != seq.slot or row.serial != seq.serial:
                    raise RuntimeError(f"request {seq.id}: expected a token of slot {seq.slot}, got {row}")
                seq.tokens.append(row.token)
                self._publish(seq)
                finish = FINISH[TokenFlag(row.flag)] if row.flag else ""
                if finish:
                    self._end(seq, finish)
                logprobs = []
                if seq.request.logprobs != NO_LOGPROBS:
                    logprobs = [logprob(reader, plan.step, part.sample, row.token, seq.request.logprobs)]
                out.append(TokenOut(seq.id, [row.token], finish, seq.cached_tokens, logprobs, scores))
            else:
                self._publish(seq)
                if scores:  # a piece at a time: those of a long prompt together would not fit through the seam
                    out.append(TokenOut(seq.id, [], "", seq.cached_tokens, [], scores))
        return out

    def _take_scores(
        self, seq: Sequence, step: int, rows: list[TokenRow], part: Part, reader: TokenReader
    ) -> list[Logprob]:
        first, count = seq.retired - part.count, seq.request.prompt_logprobs
        # What was scored before a preemption is not scored again, and the last token of the prompt has no successor to score.
        new = range(seq.scored - first, min(part.count, seq.prompt_len - 1 - first))
        seq.scored += len(new)
        return [logprob(reader, step, i, rows[i].token, count) for i in new]

    def _publish(self, seq: Sequence) -> None:
        full = seq.retired // self.block_tokens
        if self.reuse_prefixes and full > seq.published:
            seq.extend_hashes(self.block_tokens, seq.retired)
            for i in range(seq.published, full):
                self.pool.publish(seq.blocks[i], seq.hashes[i])
            seq.published = full

    # -- leaving ------------------------------------------------------------------------------------------------------

    def _end(self, seq: Sequence, reason: str) -> None:
        seq.finish = reason
        del self._by_id[seq.id]
        if seq.slot == NO_SLOT:
            self.waiting.remove(seq)
        else:
            self._leave(seq)
            if seq.in_flight == 0:
                self._release(seq)

    def _leave(self, seq: Sequence) -> None:
        """Take no part in further steps."""
        if seq in self.prefilling:
            self.prefilling.remove(seq)
        elif seq.row >= 0:
            self._drop_row(seq)

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        self._free_slots.append(seq.slot)
        seq.blocks, seq.slot = [], NO_SLOT

    def _preempt(self, seq: Sequence) -> None:
        """Give back all it holds; it starts again from its tokens, which gives the same continuation."""
        if len(self.rows) + len(self.prefilling) == 1:
            raise RuntimeError(f"request {seq.id} alone does not fit into {self.pool.num_blocks} blocks")
        self._leave(seq)
        self._release(seq)
        seq.computed = seq.retired = seq.published = 0
        self.waiting.appendleft(seq)
        self.preemptions += 1

    def _add_row(self, seq: Sequence) -> None:
        if seq.computed >= seq.max_len - 1:
            return  # the token sampled from its prompt is its last
        seq.row = len(self.rows)
        self.rows.append(seq)
        self.delta.patch(Field.DECODE_ROWS, seq.row, [seq.slot])

    def _drop_row(self, seq: Sequence) -> None:
        last = self.rows.pop()
        if last is not seq:
            self.rows[seq.row] = last
            last.row = seq.row
            self.delta.patch(Field.DECODE_ROWS, last.row, [last.slot])
        self.delta.patch(Field.DECODE_ROWS, len(self.rows), [abi.PAD])
        seq.row = -1


def logprob(reader: TokenReader, step: int, sample: int, token: int, count: int) -> Logprob:
    """What a step said of a token, with `count` alternatives."""
    value, rank, tokens, values = reader.logprobs(step, sample)
    return Logprob(token, value, rank, list(zip(tokens, values, strict=True))[:count])
