"""What the step's operations see of a step: static arrays, sliced to one graph's sizes.

Allocated and filled by `graphrt.capture`; described here because operations may not import what stands above them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphrt.kernels.array import Array

# decode: one token of each row's sequence. prefill: prompt tokens, few of them sampled. score: prompt tokens, all with logits.
StepKind = Literal["decode", "prefill", "score"]


@dataclass(frozen=True, slots=True)
class StepView:
    """The arrays of one step kind and size. Every one is a view of memory that never moves.

    rows: tokens processed together; samples: rows that get logits and a sampled token.
    tokens, positions, row_slot: [rows] int32, filled by `Ops.begin_step`; row_slot is PAD for padding rows.
    sample_rows: [samples] int32, PAD for none. targets: [samples] int32, the token to score, PAD to sample one.
    next_tokens: [samples] int32.
    slots: [slots, SLOT_WORDS] int32. block_table: [slots, max_blocks] int32.
    bias_ids, bias_values: [slots, MAX_BIAS]. prompt_seen: [slots, ceil(V / 32)] uint32. output_counts: [slots, V] int32.
    control: [4] uint32, word 0 the number of steps done. delta, token_ring, logprob_ring: uint32 rings of `abi`.
    stamps: [depth, 2] uint64: when a step's first kernel began and its last ended, in ns of the device's own clock.
    decode_rows, prefill_*: what patches write (see `abi.Field`).
    caches: the KV caches by the names of the model's KVSpec.
    """

    kind: StepKind
    rows: int
    samples: int
    tokens: Array
    positions: Array
    row_slot: Array
    sample_rows: Array
    targets: Array
    next_tokens: Array
    slots: Array
    block_table: Array
    bias_ids: Array
    bias_values: Array
    prompt_seen: Array
    output_counts: Array
    control: Array
    delta: Array
    token_ring: Array
    logprob_ring: Array
    stamps: Array
    decode_rows: Array
    prefill_tokens: Array
    prefill_positions: Array
    prefill_slots: Array
    prefill_samples: Array
    score_targets: Array
    caches: dict[str, Array]
