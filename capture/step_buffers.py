"""All memory that a step reads or writes, allocated once. State lives per slot; rows map to slots.

The one clever thing: a graph of any size sees the same addresses, only shorter views, so a batch may grow and shrink at every step without
moving anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphrt.errors import ConfigError
from graphrt.kernels import abi
from graphrt.kernels.array import Array
from graphrt.kernels.ops import Ops
from graphrt.kernels.step_state import StepKind, StepView

RING_DEPTH = 4  # records; more than the replays that can be in flight


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes for which there are graphs, ascending. A batch between two sizes pads up to the larger.

    decode, prefill, score: rows of steps of these kinds. prefill_samples: rows of a prefill step that may be sampled.
    """

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    score: tuple[int, ...]
    prefill_samples: int

    def __post_init__(self) -> None:
        for name, sizes in self.by_kind().items():
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f"{name} sizes {sizes} must be ascending and at least 1")

    def by_kind(self) -> dict[StepKind, tuple[int, ...]]:
        """All sizes."""
        return {"decode": self.decode, "prefill": self.prefill, "score": self.score}

    def samples(self, kind: StepKind, rows: int) -> int:
        """Rows with logits in a step of this kind and size."""
        return self.prefill_samples if kind == "prefill" else rows

    def padded(self, kind: StepKind, rows: int) -> int:
        """The smallest size that holds this many rows; ValueError when none does."""
        for size in self.by_kind()[kind]:
            if size >= rows:
                return size
        raise ValueError(f"no {kind} graph holds {rows} rows")


@dataclass(frozen=True, slots=True)
class CacheArray:
    """Shape and element type of one KV cache, all blocks or slots together."""

    shape: tuple[int, ...]
    dtype: str


class StepBuffers:
    """Owns the memory; `view` gives a graph its slice."""

    def __init__(
        self, ops: Ops, sizes: StepSizes, *, slots: int, max_blocks: int, vocab: int, caches: Mapping[str, CacheArray]
    ) -> None:
        """slots: sequences that may hold state at once. max_blocks: blocks of the longest sequence. vocab: tokens with logits."""
        self.sizes = sizes
        self.num_slots = slots
        self.max_blocks = max_blocks
        max_batch, chunk = sizes.decode[-1], max(sizes.prefill[-1], sizes.score[-1])
        max_rows = max(max_batch, chunk)
        samples = max(sizes.samples(kind, rows[-1]) for kind, rows in sizes.by_kind().items())
        seen_words = -(-vocab // 32)
        # The largest record: a full prefill chunk, and every slot left, joined anew with its longest block table, and grown.
        patches = 32 + 8 * slots + max_batch
        words = (
            abi.RECORD_HEADER
            + patches * abi.PATCH_HEADER
            + 3 * chunk
            + 2 * samples
            + slots * (abi.SLOT_WORDS + max_blocks + 2 * abi.MAX_BIAS + seen_words + 8)
            + max_batch
        )

        def ints(*shape: int, dtype: Any = np.int32) -> Array:
            return ops.alloc(shape, dtype)

        self.tokens, self.positions, self.row_slot = ints(max_rows), ints(max_rows), ints(max_rows)
        self.sample_rows, self.targets, self.next_tokens = ints(samples), ints(samples), ints(samples)
        self.slots = ints(slots, abi.SLOT_WORDS)
        self.block_table = ints(slots, max_blocks)
        self.bias_ids = ints(slots, abi.MAX_BIAS)
        self.bias_values = ints(slots, abi.MAX_BIAS, dtype=np.float32)
        self.prompt_seen = ints(slots, seen_words, dtype=np.uint32)
        self.output_counts = ints(slots, vocab)
        self.control = ints(4, dtype=np.uint32)
        # The rings are all that the host shares with a step.
        self.delta = ops.alloc_mapped((RING_DEPTH, words), np.uint32)
        self.token_ring = ops.alloc_mapped((RING_DEPTH, abi.RECORD_HEADER + samples * abi.TOKEN_WORDS), np.uint32)
        self.logprob_ring = ops.alloc_mapped((RING_DEPTH, samples, abi.LOGPROB_WORDS), np.uint32)
        self.stamps = ops.alloc_mapped((RING_DEPTH, 2), np.uint64)
        self.decode_rows = ints(max_batch)
        self.prefill_tokens, self.prefill_positions, self.prefill_slots = ints(chunk), ints(chunk), ints(chunk)
        self.prefill_samples, self.score_targets = ints(samples), ints(samples)
        self.caches = {name: ops.alloc(c.shape, c.dtype) for name, c in caches.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, caches included."""
        own = sum(value.nbytes for value in vars(self).values() if isinstance(value, Array))
        return own + sum(cache.nbytes for cache in self.caches.values())

    def view(self, kind: StepKind, rows: int) -> StepView:
        """What a step of this kind and size sees."""
        samples = self.sizes.samples(kind, rows)
        return StepView(
            kind=kind,
            rows=rows,
            samples=samples,
            tokens=self.tokens[:rows],
            positions=self.positions[:rows],
            row_slot=self.row_slot[:rows],
            sample_rows=self.sample_rows[:samples],
            targets=self.targets[:samples],
            next_tokens=self.next_tokens[:samples],
            slots=self.slots,
            block_table=self.block_table,
            bias_ids=self.bias_ids,
            bias_values=self.bias_values,
            prompt_seen=self.prompt_seen,
            output_counts=self.output_counts,
            control=self.control,
            delta=self.delta,
            token_ring=self.token_ring,
            logprob_ring=self.logprob_ring,
            stamps=self.stamps,
            decode_rows=self.decode_rows,
            prefill_tokens=self.prefill_tokens,
            prefill_positions=self.prefill_positions,
            prefill_slots=self.prefill_slots,
            prefill_samples=self.prefill_samples,
            score_targets=self.score_targets,
            caches=self.caches,
        )
