"""The sequences that decode, by row, and when one of them needs attention.

The one clever thing: every row takes part in every decode step, so one counter tells all their lengths, and a calendar over that counter
says before which step a row needs another block, or has had its last. All other steps look at no row at all.
"""

from __future__ import annotations

from graphrt.capture.delta import DeltaWriter
from graphrt.capture.step_buffers import StepSizes
from graphrt.kernels import abi
from graphrt.kernels.abi import Field
from graphrt.sequence import Sequence
from graphrt.step_plan import Group, StepPlan


class DecodeRows:
    """Rows are dense: who leaves is replaced by the last. Only the rows that change are written to the delta record."""

    def __init__(self, delta: DeltaWriter, sizes: StepSizes, *, max_blocks: int, block_tokens: int) -> None:
        self.rows: list[Sequence] = []
        self.steps = 0  # decode steps launched
        self._delta, self._sizes = delta, sizes
        self._max_blocks, self._block_tokens = max_blocks, block_tokens
        self._last = 0  # number of the last of them among all steps
        self._calendar: dict[int, list[Sequence]] = {}  # by the value of `steps`; each row once, none in the past
        self._group: Group | None = None  # of `rows`, until they change
        self._size = 0
        delta.patch(Field.DECODE_ROWS, 0, [abi.PAD] * sizes.decode[-1])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def due(self) -> list[Sequence] | None:
        """Rows that must `grow` or `leave` before the next step, None for nobody."""
        return self._calendar.get(self.steps)

    def computed(self, seq: Sequence) -> int:
        """Tokens whose KV is in the cache once the launched steps retire."""
        return seq.computed if seq.row < 0 else seq.lead + self.steps

    def done(self, seq: Sequence) -> bool:
        """Whether the last launched step samples its last token."""
        return self.computed(seq) >= seq.max_len - 1

    def join(self, seq: Sequence) -> None:
        """Decode a sequence whose prompt has been launched, unless the token sampled from its prompt is its last."""
        if seq.computed >= seq.max_len - 1:
            return
        seq.lead = seq.computed - self.steps
        seq.row = len(self.rows)
        self.rows.append(seq)
        self._delta.patch(Field.DECODE_ROWS, seq.row, [seq.slot])
        self._enter(seq)
        self._group = None

    def leave(self, seq: Sequence) -> None:
        """Take no part in further steps."""
        seq.computed = self.computed(seq)
        seq.last_step = max(seq.last_step, self._last)
        self._strike(seq)
        last = self.rows.pop()
        if last is not seq:
            self.rows[seq.row] = last
            last.row = seq.row
            self._delta.patch(Field.DECODE_ROWS, last.row, [last.slot])
        self._delta.patch(Field.DECODE_ROWS, len(self.rows), [abi.PAD])
        seq.row = -1
        self._group = None

    def grow(self, seq: Sequence, block: int) -> None:
        """Give a row one more block."""
        self._delta.patch(Field.BLOCK_TABLE, seq.slot * self._max_blocks + len(seq.blocks), [block])
        seq.blocks.append(block)
        self._strike(seq)
        self._enter(seq)

    def launch(self, number: int) -> StepPlan:
        """The next decode step, which is the `number`-th of all; none of the rows may be due."""
        group = self._group
        if group is None:
            group = self._group = Group(self.rows.copy())
            self._size = self._sizes.padded("decode", len(self.rows))
        self._last = number
        self.steps = steps = self.steps + 1
        full = tuple(self._calendar[steps]) if steps in self._calendar else ()
        return StepPlan("decode", self._size, len(group.ids), [], group, full, number)

    def _enter(self, seq: Sequence) -> None:
        full, end = len(seq.blocks) * self._block_tokens, seq.max_len - 1
        seq.due = due = (full if full < end else end) - seq.lead
        if due in self._calendar:
            self._calendar[due].append(seq)
        else:
            self._calendar[due] = [seq]

    def _strike(self, seq: Sequence) -> None:
        entries = self._calendar[seq.due]
        entries.remove(seq)
        if not entries:
            del self._calendar[seq.due]
