"""Attention of many rows, as a prompt has them: `attention_prefill.cu`, how its work is cut, and its twin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.attention_decode import MAX_GROUP, MAX_HEAD, MAX_PAIRS, words_as_floats
from graphrt.kernels.cuda.attention_twin import attend
from graphrt.kernels.cuda.checks import BF16, contiguous, shaped, typed
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.step_state import StepView

THREADS = 128
SHARE_TOKENS = 1024  # that a block has at least, where several share the keys of a tile
MAX_SHARES = 16


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """tile_m: query rows of a block, 64 or 128; shares: blocks that a tile's keys are cut among where they are many."""

    tile_m: int
    shares: int

    def tiles(self, rows: int, group: int) -> int:
        """Tiles of one key head."""
        return -(-rows // (self.tile_m // group))

    def smem(self, group: int, head_dim: int) -> int:
        """Bytes of dynamic shared memory: queries, two stages of keys and values, slots and positions."""
        return (self.tile_m + 4 * _keys(head_dim)) * (2 * head_dim + 16) + 8 * (self.tile_m // group)

    def words(self, rows: int, kv_heads: int, group: int, head_dim: int) -> int:
        """Of the parts of tiles whose keys are shared."""
        if self.shares == 1:
            return 0
        return self.tiles(rows, group) * kv_heads * self.shares * self.tile_m * (head_dim + 2)


def _keys(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 32  # as in the kernel


def choose(rows: int, kv_heads: int, group: int, sm_count: int) -> PrefillTuning:
    """Large tiles where they fill the card; else small ones, whose keys several blocks share."""
    large = PrefillTuning(128, 1)
    if large.tiles(rows, group) * kv_heads >= sm_count:
        return large
    blocks = PrefillTuning(64, 1).tiles(rows, group) * kv_heads
    return PrefillTuning(64, min(max(2 * sm_count // blocks, 1), MAX_SHARES))


def fits(group: int, head_dim: int, block_tokens: int) -> bool:
    """Whether the kernel takes this shape."""
    if not (1 <= group <= MAX_GROUP and head_dim % 16 == 0 and 16 <= head_dim <= MAX_HEAD and block_tokens % 16 == 0):
        return False
    keys = _keys(head_dim)
    return keys % block_tokens == 0 or block_tokens % keys == 0


def attention_prefill_spec(group: int, head_dim: int, block_tokens: int, tuning: PrefillTuning) -> KernelSpec:
    """ValueError for a shape that the kernel does not take."""
    if not fits(group, head_dim, block_tokens):
        raise ValueError(
            f"attention: {group} query heads share a key head of {head_dim} values in blocks of {block_tokens} tokens; must be up to "
            f"{MAX_GROUP} heads, a multiple of 16 values up to {MAX_HEAD}, and 16, 32 or a multiple of 64 tokens"
        )
    return KernelSpec.of(
        "attention_prefill.cu",
        "attention_prefill",
        group=group,
        head_dim=head_dim,
        block_tokens=block_tokens,
        tile_m=tuning.tile_m,
        min_blocks=2 if tuning.tile_m == 128 else 3,
    )


def attention_prefill_workspace(rows: int, heads: int, kv_heads: int, head_dim: int, sm_count: int) -> int:
    """Words [uint32] of workspace that a launch with so many rows takes: arrival counters, then the parts of shared tiles."""
    group = heads // kv_heads
    return MAX_PAIRS + choose(rows, kv_heads, group, sm_count).words(rows, kv_heads, group, head_dim)


def attention_prefill_call(
    driver: Driver,
    q: Array,
    b: StepView,
    cache: Array,
    layer: int,
    scale: float,
    out: Array,
    workspace: Array,
    tuning: PrefillTuning | None = None,
) -> KernelCall:
    """q [R, H, E] bf16, cache [blocks, layers, 2, K, block_tokens, E] bf16 -> out [R, H, E] bf16, zeros for padding rows.

    Any rows, in any order; fast where neighbours are of one slot. workspace: as `attention_decode_call` takes it, and the same one may be
    used. ValueError for arrays that do not fit together, a workspace that is too small, or a scale that is not positive.
    """
    rows, heads, e = q.shape
    blocks, layers, _, kv_heads, block_tokens, _ = cache.shape
    group = heads // kv_heads
    for a, what in ((q, "queries"), (out, "attention's output"), (cache, "KV cache")):
        typed(a, BF16, what=what)
    shaped(out, q.shape, "attention's output")
    shaped(cache, (blocks, layers, 2, kv_heads, block_tokens, e), "KV cache")
    contiguous(q, out, cache, b.block_table, workspace)
    t = tuning or choose(rows, kv_heads, group, driver.sm_count)
    if heads != group * kv_heads:
        raise ValueError(f"attention: {heads} query heads must be a multiple of {kv_heads} key heads")
    if scale <= 0:
        raise ValueError(f"attention: scale {scale} must be positive")
    spec = attention_prefill_spec(group, e, block_tokens, t)
    tiles = t.tiles(rows, group) * kv_heads
    need = MAX_PAIRS + t.words(rows, kv_heads, group, e)
    if t.shares > 1 and (workspace.shape[0] < need or tiles > MAX_PAIRS):
        raise ValueError(f"attention: a workspace of {workspace.shape[0]} words; {rows} rows need {need}")
    i32 = np.int32
    return KernelCall(
        spec,
        (tiles, t.shares, 1),
        (THREADS, 1, 1),
        (
            q,
            cache[:, layer],
            b.block_table,
            b.row_slot,
            b.positions,
            out,
            workspace[:MAX_PAIRS],
            words_as_floats(workspace[MAX_PAIRS:]) if t.shares > 1 else None,
            np.int64(cache.strides[0]),
            np.int64(cache.strides[2]),
            i32(rows),
            i32(kv_heads),
            i32(b.block_table.shape[1]),
            i32(SHARE_TOKENS),
            np.float32(scale * math.log2(math.e)),
        ),
        smem=t.smem(group, e),
    )


def attention_prefill_twin(call: KernelCall, args: list[Any]) -> None:
    """Writes `out`."""
    q, pages, block_table, row_slot, positions, out, *_, scale = args
    attend(q, pages, block_table, row_slot, positions, float(scale) / math.log2(math.e), out)


TWINS = {"attention_prefill": attention_prefill_twin}


def representative_specs() -> list[KernelSpec]:
    """Both tiles at the shapes of 1B and 8B models; other head sizes, groups and blocks."""
    large, small = PrefillTuning(128, 1), PrefillTuning(64, 2)
    shapes = [(4, 64, 32, large), (4, 128, 32, large), (4, 128, 32, small), (3, 64, 16, small)]
    shapes += [(1, 80, 16, large), (16, 96, 16, large), (7, 128, 64, large), (2, 16, 16, small)]
    return [attention_prefill_spec(*s) for s in shapes]
