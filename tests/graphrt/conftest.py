"""Ways to drive a model's step without an engine, and an engine without a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from graphrt.capture.delta import SLOT_STRUCT, DeltaWriter
from graphrt.capture.graph import CpuStepGraph
from graphrt.capture.step_buffers import CacheArray, StepBuffers, StepSizes
from graphrt.capture.token_ring import TokenReader, TokenRow
from graphrt.kernels import abi
from graphrt.kernels.abi import Field
from graphrt.kernels.cpu_ops import make_cpu_ops
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.step_state import StepKind, StepView
from graphrt.models.registry import load_model


def slot_bytes(
    seq_len: int, *, serial: int = 1, temperature: float = 0.0, seed: int = 0, max_len: int = 1 << 30
) -> bytes:
    """A running slot that samples as asked."""
    return SLOT_STRUCT.pack(
        seq_len,
        0,
        max_len,
        abi.SlotState.RUNNING,
        serial,
        temperature,
        0,
        1.0,
        0.0,
        seed,
        0,
        1.0,
        0.0,
        0.0,
        *([0] * 18),
    )


class StepRunner:
    """Runs single steps and returns the logits of all their live rows. Blocks are dealt out shuffled, all poisoned with NaN."""

    def __init__(
        self, model_dir: Path, ops: NumpyOps, *, slots: int = 8, context: int = 256, rows: int = 64, seed: int = 1
    ) -> None:
        self.ops, self.rows = ops, rows
        tokens = 16
        self.loaded = load_model(model_dir, ops, context)
        spec = self.loaded.spec
        max_blocks = -(-context // tokens)
        blocks = slots * max_blocks + 3
        caches = {
            c.name: CacheArray(spec.array_shape(c, blocks=blocks, slots=slots, block_tokens=tokens), c.dtype)
            for c in spec.caches
        }
        sizes = StepSizes(tuple(range(1, slots + 1)), tuple(range(1, rows + 1)), (rows,), rows)
        self.buffers = StepBuffers(
            ops, sizes, slots=slots, max_blocks=max_blocks, vocab=self.loaded.config.vocab_size, caches=caches
        )
        for cache in self.buffers.caches.values():
            cache.np[:] = np.nan
        self.delta, self.reader = (
            DeltaWriter(self.buffers.delta),
            TokenReader(self.buffers.token_ring, self.buffers.logprob_ring, self.buffers.stamps),
        )
        table = np.random.default_rng(seed).permutation(blocks)[: slots * max_blocks].reshape(slots, max_blocks)
        for slot in range(slots):
            self.delta.patch(Field.BLOCK_TABLE, slot * max_blocks, table[slot].tolist())
        self.table = table
        self.tokens_out: list[TokenRow] = []

    def _run(self, kind: StepKind, size: int) -> NDArray[np.float32]:
        logits = []

        def step(b: StepView) -> Any:
            out = self.loaded.model.step(self.ops, self.loaded.weights, b)
            logits.append(out.np.copy())
            return out

        number = self.delta.publish()
        self.ops.arena.poison()
        CpuStepGraph(self.ops, step, self.buffers.view(kind, size)).launch()
        self.tokens_out = self.reader.read(number, 1)
        return logits[0]

    def prefill(self, *parts: tuple[int, int, list[int]], padding: int = 0) -> list[NDArray[np.float32]]:
        """One step over (slot, start, tokens) parts and some padding rows; the logits of every part's tokens."""
        tokens = [t for _, _, ts in parts for t in ts]
        positions = [start + i for _, start, ts in parts for i in range(len(ts))]
        slots = [slot for slot, _, ts in parts for _ in ts]
        live, size = len(tokens), len(tokens) + padding
        for slot, start, _ in parts:
            self.delta.patch_slot(slot, slot_bytes(start))
        self.delta.patch(Field.PREFILL_TOKENS, 0, tokens + [0] * padding)
        self.delta.patch(Field.PREFILL_POSITIONS, 0, positions + [0] * padding)
        self.delta.patch(Field.PREFILL_SLOTS, 0, slots + [abi.PAD] * padding)
        self.delta.patch(Field.PREFILL_SAMPLES, 0, [*range(live), *[abi.PAD] * (self.rows - live)])
        logits = self._run("prefill", size)
        ends = np.cumsum([len(ts) for _, _, ts in parts])
        return list(np.split(logits[:live], ends[:-1]))

    def decode(self, feed: dict[int, tuple[int, int]], *, size: int | None = None) -> dict[int, NDArray[np.float32]]:
        """One step that feeds {slot: (position, token)}; the logits of each slot."""
        size = size or len(feed)
        for slot, (position, token) in feed.items():
            packed = bytearray(slot_bytes(position))
            packed[4:8] = token.to_bytes(4, "little")
            self.delta.patch_slot(slot, bytes(packed))
        self.delta.patch(Field.DECODE_ROWS, 0, [*feed, *[abi.PAD] * (size - len(feed))])
        logits = self._run("decode", size)
        return {slot: logits[i] for i, slot in enumerate(feed)}


@pytest.fixture
def step_runner() -> Callable[..., StepRunner]:
    """`step_runner(model_dir, numpy=False, **sizes)`; on the compiled kernels unless `numpy`."""

    def make(model_dir: Path, numpy: bool = False, **sizes: Any) -> StepRunner:
        return StepRunner(model_dir, NumpyOps() if numpy else make_cpu_ops(), **sizes)

    return make
