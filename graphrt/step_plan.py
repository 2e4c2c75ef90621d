"""A launched step, until it retires: who takes part, and which of its samples are whose."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec

from graphrt.kernels.step_state import StepKind
from graphrt.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's share of a step over prompt tokens: `count` tokens, which sample of the step is its next token (-1: none), and
    whether samples 0 .. count - 1 score its prompt."""

    seq: Sequence
    count: int
    sample: int
    scored: bool = False


class Group:
    """Sequences that decode together. The same object step after step while nobody comes or goes: what a step needs of them is
    gathered once, and is never changed.

    samples: which sample of the step is each one's. ids: of the requests. keys and calm: the columns `keys` and `flags` of a step that
    goes as expected and in which nobody ends. tokens: each one's own list. reporting: the indices of those whose
    log-probabilities are wanted.
    """

    __slots__ = ("calm", "ids", "keys", "reporting", "samples", "seqs", "tokens")

    def __init__(self, seqs: list[Sequence], samples: list[int] | range | None = None) -> None:
        self.seqs = seqs
        self.samples = range(len(seqs)) if samples is None else samples
        self.ids = [seq.id for seq in seqs]
        self.keys = memoryview(array("Q", [seq.key for seq in seqs]))
        self.calm = memoryview(array("I", bytes(4 * len(seqs))))
        self.tokens = [seq.tokens for seq in seqs]
        self.reporting = [i for i, seq in enumerate(seqs) if seq.reports]

    def unfinished(self) -> Group:
        """Without those that have finished meanwhile."""
        live = [i for i, seq in enumerate(self.seqs) if not seq.finish]
        return Group([self.seqs[i] for i in live], [self.samples[i] for i in live])


class StepPlan(msgspec.Struct, eq=False):
    """One launched step. A struct because one is made at every step: a dataclass takes three times as long.

    size: rows of its graph; rows: of these, not padding. parts: of a step over prompt tokens; group: of a decode step.
    full: sequences of a decode step whose last block it fills, or whose last token it samples.
    number: 1, 2, 3, ... of all steps; step: the same as the rings count it, in 32 bits.
    """

    kind: StepKind
    size: int
    rows: int
    parts: list[Part]
    group: Group | None = None
    full: tuple[Sequence, ...] = ()
    number: int = 0
    step: int = 0

    @property
    def seqs(self) -> list[Sequence]:
        """All that take part."""
        return [part.seq for part in self.parts] if self.group is None else self.group.seqs
