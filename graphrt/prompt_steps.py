"""Steps over prompt tokens: chunks of several prompts together, or of one whose tokens are all scored."""

from __future__ import annotations

from graphrt.capture.delta import DeltaWriter
from graphrt.capture.step_buffers import StepSizes
from graphrt.kernels import abi
from graphrt.kernels.abi import Field
from graphrt.kernels.step_state import StepKind
from graphrt.sequence import Sequence
from graphrt.step_plan import Part, StepPlan

Ints = list[int] | range


class PromptSteps:
    """Writes the rows of such steps to the delta record."""

    def __init__(self, delta: DeltaWriter, sizes: StepSizes) -> None:
        self._delta, self._sizes = delta, sizes

    def plan(self, prefilling: list[Sequence], number: int) -> tuple[StepPlan, list[Sequence]]:
        """The step over what is next of `prefilling`, the `number`-th of all steps, and those whose prompt it ends."""
        plan = self._score(prefilling[0]) if prefilling[0].scoring else self._prefill(prefilling)
        plan.number = number
        for part in plan.parts:
            part.seq.last_step = number
        return plan, [part.seq for part in plan.parts if part.sample >= 0]

    def _prefill(self, prefilling: list[Sequence]) -> StepPlan:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        samples: list[int] = []
        parts = []
        room = self._sizes.prefill[-1]
        for seq in prefilling:
            count = min(room - len(tokens), seq.prefill_end - seq.computed)
            last = seq.computed + count == seq.prefill_end
            if count == 0 or seq.scoring or (last and len(samples) == self._sizes.prefill_samples):
                break
            tokens += seq.tokens[seq.computed : seq.computed + count]
            positions += range(seq.computed, seq.computed + count)
            slots += [seq.slot] * count
            seq.computed += count
            parts.append(Part(seq, count, len(samples) if last else -1))
            if last:
                samples.append(len(tokens) - 1)
        return self._step("prefill", parts, tokens, positions, slots, samples)

    def _score(self, seq: Sequence) -> StepPlan:
        """A chunk of one prompt whose tokens all want their log-probabilities."""
        start = seq.computed
        count = min(self._sizes.score[-1], seq.prefill_end - start)
        seq.computed += count
        last = seq.computed == seq.prefill_end
        self._delta.patch(Field.SCORE_TARGETS, 0, seq.tokens[start + 1 : start + 1 + count] + [abi.PAD] * last)
        return self._step(
            "score",
            [Part(seq, count, count - 1 if last else -1, scored=True)],
            seq.tokens[start : seq.computed],
            range(start, seq.computed),
            [seq.slot] * count,
            range(count),
        )

    def _step(
        self, kind: StepKind, parts: list[Part], tokens: Ints, positions: Ints, slots: Ints, samples: Ints
    ) -> StepPlan:
        """Describe the rows, padded to a size that has a graph."""
        rows = len(tokens)
        size = self._sizes.padded(kind, rows)
        padding = size - rows
        self._delta.patch(Field.PREFILL_TOKENS, 0, [*tokens, *[0] * padding])
        self._delta.patch(Field.PREFILL_POSITIONS, 0, [*positions, *[0] * padding])
        self._delta.patch(Field.PREFILL_SLOTS, 0, [*slots, *[abi.PAD] * padding])
        unused = self._sizes.samples(kind, size) - len(samples)
        self._delta.patch(Field.PREFILL_SAMPLES, 0, [*samples, *[abi.PAD] * unused])
        return StepPlan(kind, size, rows, parts)
