"""What models declare about their caches, and that the buffers follow."""

from __future__ import annotations

import pytest

from graphrt.capture.step_buffers import CacheArray, StepBuffers, StepSizes
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kv_spec import KVSpec, Paged, Ring, State

MIXED = KVSpec(
    (
        Paged("kv", (3, 2, 4), 64),
        Paged("pooled", (2,), 32, dtype="float16", ratio=4),
        Ring("window", 128, (5, 8)),
        State("odd", (7,), dtype="int32"),
    )
)


def test_sizes() -> None:
    assert MIXED.block_bytes(16) == 3 * 2 * 4 * 16 * 64 * 4 + 2 * 4 * 32 * 2
    assert MIXED.slot_bytes() == 128 * 40 * 4 + 7 * 4
    assert not MIXED.prefix_reusable and KVSpec(MIXED.caches[:2]).prefix_reusable
    with pytest.raises(ValueError, match=r"cache pooled: blocks of 6 tokens are not divisible by the ratio 4"):
        MIXED.block_bytes(6)
    with pytest.raises(ValueError, match="not unique"):
        KVSpec((Paged("a", (1,), 2), State("a", (1,))))


def test_layouts_differ_where_blocks_do() -> None:
    base = KVSpec((Paged("kv", (3, 2, 4), 64),))
    others = [KVSpec((Paged("kv", (3, 2, 4), 32),)), KVSpec((Paged("kv", (3, 2, 4), 64, "float16"),))]
    assert len({base.layout(16), base.layout(32), *(o.layout(16) for o in others)}) == 4


def test_buffers_hold_every_kind_of_cache() -> None:
    shapes = {
        c.name: CacheArray(MIXED.array_shape(c, blocks=10, slots=3, block_tokens=16), c.dtype) for c in MIXED.caches
    }
    buffers = StepBuffers(NumpyOps(), StepSizes((1, 2), (8,), (8,), 1), slots=3, max_blocks=4, vocab=9, caches=shapes)
    got = {name: (a.shape, a.dtype.name) for name, a in buffers.caches.items()}
    assert got == {
        "kv": ((10, 3, 2, 4, 16, 64), "float32"),
        "pooled": ((10, 2, 4, 32), "float16"),
        "window": ((3, 128, 5, 8), "float32"),
        "odd": ((3, 7), "int32"),
    }
    assert buffers.caches["kv"][3].np.flags.c_contiguous, "a block is one contiguous range"
