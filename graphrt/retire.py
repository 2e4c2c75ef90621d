"""What a retired step said: its tokens to their sequences, and the record for the server.

A decode step in which nobody ends and nobody wants log-probabilities is the common case: its tokens go on as two lists, without an object for
each row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from graphrt.capture.token_ring import TokenReader, TokenRow
from graphrt.kernels.abi import TokenFlag
from graphrt.seam.records import NO_LOGPROBS, Logprob, Output, TokenOut
from graphrt.sequence import Sequence
from graphrt.step_plan import StepPlan

FINISH = {TokenFlag.STOP: "stop", TokenFlag.LENGTH: "length"}

Ends = Iterable[tuple[Sequence, str]]  # who ended, and why
NO_ENDS: Ends = ()


def retire_decode(plan: StepPlan, reader: TokenReader, some_finished: bool) -> tuple[Output, Ends]:
    """Append the tokens of a decode step. some_finished: of its group, some may have finished since it was launched."""
    group = plan.group
    assert group is not None
    keys, words, flags = reader.columns(plan.step, plan.rows)
    tokens: list[int] = words.tolist()
    if some_finished:
        group = group.unfinished()
        tokens = [tokens[i] for i in group.samples]
        keys, flags = _some(keys, group.samples), _some(flags, group.samples)
    if keys != group.keys:
        i = next(i for i, key in enumerate(group.keys) if keys[i] != key)
        raise _mismatch(group.seqs[i], reader.rows(plan.step)[group.samples[i]])
    for known, token in zip(group.tokens, tokens, strict=True):
        known.append(token)
    if flags == group.calm and not group.reporting:
        return Output([], group.ids, tokens), NO_ENDS
    ends = {i: FINISH[TokenFlag(flag)] for i, flag in enumerate(flags) if flag}
    apart, items = {*group.reporting, *ends}, []
    for i in sorted(apart):
        seq, count = group.seqs[i], group.seqs[i].request.logprobs
        said = [] if count == NO_LOGPROBS else [logprob(reader, plan.step, group.samples[i], tokens[i], count)]
        items.append(TokenOut(seq.id, [tokens[i]], ends.get(i, ""), seq.cached_tokens, said))
    rest = [i for i in range(len(tokens)) if i not in apart]
    output = Output(items, [group.ids[i] for i in rest], [tokens[i] for i in rest])
    return output, [(group.seqs[i], reason) for i, reason in ends.items()]


def retire_prompt(plan: StepPlan, reader: TokenReader) -> tuple[Output, Ends]:
    """Take in a step over prompt tokens: first tokens, and scores."""
    rows = reader.rows(plan.step)
    items: list[TokenOut] = []
    ends: list[tuple[Sequence, str]] = []
    for part in plan.parts:
        seq = part.seq
        if seq.finish:
            continue
        seq.retired += part.count
        scores = _take_scores(seq, plan.step, rows, part.count, reader) if part.scored else []
        if part.sample < 0:
            if scores:  # a piece at a time: those of a long prompt together would not fit through the seam
                items.append(TokenOut(seq.id, [], "", seq.cached_tokens, [], scores))
            continue
        row, count = rows[part.sample], seq.request.logprobs
        if row.slot != seq.slot or row.serial != seq.serial:
            raise _mismatch(seq, row)
        seq.tokens.append(row.token)
        said = [] if count == NO_LOGPROBS else [logprob(reader, plan.step, part.sample, row.token, count)]
        finish = FINISH[TokenFlag(row.flag)] if row.flag else ""
        if finish:
            ends.append((seq, finish))
        items.append(TokenOut(seq.id, [row.token], finish, seq.cached_tokens, said, scores))
    return Output(items), ends


def _take_scores(seq: Sequence, step: int, rows: list[TokenRow], count: int, reader: TokenReader) -> list[Logprob]:
    first, wanted = seq.retired - count, seq.request.prompt_logprobs
    # What was scored before a preemption is not scored again, and the last token of the prompt has no successor to score.
    new = range(seq.scored - first, min(count, seq.prompt_len - 1 - first))
    seq.scored += len(new)
    return [logprob(reader, step, i, rows[i].token, wanted) for i in new]


def _some(column: memoryview, samples: Iterable[int]) -> memoryview:
    return memoryview(array(column.format, [column[i] for i in samples]))


def _mismatch(seq: Sequence, row: TokenRow) -> RuntimeError:
    return RuntimeError(f"request {seq.id}: expected a token of slot {seq.slot}, got {row}")


def logprob(reader: TokenReader, step: int, sample: int, token: int, count: int) -> Logprob:
    """What a step said of a token, with `count` alternatives."""
    value, rank, tokens, values = reader.logprobs(step, sample, count)
    return Logprob(token, value, rank, list(zip(tokens, values, strict=True)))
