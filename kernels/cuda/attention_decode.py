"""Attention of a decode step, one token a row: `attention_decode.cu`, how its work is cut, and its twin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.attention_twin import attend
from graphrt.kernels.cuda.checks import BF16, F32, contiguous, shaped, typed
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.step_state import StepView

CHUNK = 16  # tokens that a warp takes at a time
MAX_GROUP = 16
MAX_HEAD = 128
MAX_PAIRS = 1 << 14  # rows · key/value heads of a launch
MIN_SPLIT = 512  # tokens a block, at least, before a row is cut
SMEM = 74 * 1024  # bytes a block, so that the neighbours' blocks fit beside it
MAX_SLOTS = 12
ITEM_WORDS = 8  # of the kernel's record of a split


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """cluster: blocks of a worker; warps: of a block; slots: of each warp's ring, one a chunk's keys or values; workers: of the grid.

    min_tiles: rounds of chunks that a split has at least; max_splits: of a row; early: chunks a warp that are asked for ahead.
    """

    cluster: int
    warps: int
    slots: int
    workers: int
    min_tiles: int
    max_splits: int
    early: int = 8

    @property
    def team(self) -> int:
        """Warps of a worker."""
        return self.cluster * self.warps

    def pitch(self, group: int, head_dim: int) -> int:
        """Floats of one warp's columns in the block that owns them."""
        return -(-group * head_dim // (8 * self.cluster)) * 8 + 4

    def smem(self, rows: int, group: int, head_dim: int) -> int:
        """Bytes of dynamic shared memory, laid out as in the kernel."""
        ring = self.warps * self.slots * CHUNK * head_dim * 2
        meeting = self.team * (self.pitch(group, head_dim) + 2 * group) * 4
        return 16 + ring + meeting + 4 * (self.warps * (2 * ITEM_WORDS + 1) + 5 * rows)


def choose(rows: int, kv_heads: int, group: int, head_dim: int, sm_count: int) -> DecodeTuning:
    """Few rows: several blocks share a head's keys and meet in a cluster. Many: a block takes one split after the other."""
    pairs = rows * kv_heads
    cluster = next(c for c in (8, 4, 2, 1) if c == 1 or pairs * c <= sm_count)
    warps = 4
    per_sm = 2 if cluster == 1 and pairs > sm_count else 1  # a second block computes while the first one's keys are on their way
    workers = max(sm_count * per_sm // cluster, 1)
    if rows == 1:
        max_splits = max(workers // pairs, 1)
        workers = min(workers, pairs * max_splits)
    else:
        max_splits = 16 if cluster > 1 or rows > 64 else 32
        if rows > 256:
            max_splits = 4
    tuning = DecodeTuning(cluster, warps, 2, workers, max(MIN_SPLIT // (CHUNK * warps), 1), max_splits)
    spare = SMEM // per_sm - tuning.smem(rows, group, head_dim)
    slots = 2 + max(spare, 0) // (warps * CHUNK * head_dim * 2)
    return DecodeTuning(cluster, warps, min(slots, MAX_SLOTS), workers, tuning.min_tiles, max_splits)


def fits(group: int, head_dim: int, block_tokens: int) -> bool:
    """Whether the kernel takes this shape."""
    return 1 <= group <= MAX_GROUP and head_dim % 16 == 0 and 16 <= head_dim <= MAX_HEAD and block_tokens % CHUNK == 0


def attention_decode_spec(group: int, head_dim: int, block_tokens: int, tuning: DecodeTuning) -> KernelSpec:
    """ValueError for a shape that the kernel does not take."""
    if not fits(group, head_dim, block_tokens):
        raise ValueError(
            f"attention: {group} query heads share a key head of {head_dim} values in blocks of {block_tokens} tokens; must be up to "
            f"{MAX_GROUP} heads, a multiple of 16 values up to {MAX_HEAD}, and a multiple of {CHUNK} tokens"
        )
    return KernelSpec.of(
        "attention_decode.cu",
        "attention_decode",
        group=group,
        head_dim=head_dim,
        block_tokens=block_tokens,
        cluster=tuning.cluster,
        warps=tuning.warps,
        slots=tuning.slots,
        early=tuning.early,
        min_blocks=_min_blocks(tuning.warps, head_dim * -(-group // 8)),
    )


def _min_blocks(warps: int, values: int) -> int:
    """Blocks a multiprocessor that the compiler leaves registers for. values: of a head, for every 8 query rows."""
    registers = 128 if values <= 64 else 168 if values <= 128 else 255
    return max(65536 // (32 * warps * registers), 1)


def attention_decode_workspace(rows: int, heads: int, kv_heads: int, head_dim: int, sm_count: int) -> int:
    """Words [uint32] of workspace that a launch with so many rows takes: arrival counters, then the splits' parts."""
    group = heads // kv_heads
    return MAX_PAIRS + _parts(rows, kv_heads, group, head_dim, choose(rows, kv_heads, group, head_dim, sm_count))


def _parts(rows: int, kv_heads: int, group: int, head_dim: int, tuning: DecodeTuning) -> int:
    return rows * kv_heads * tuning.max_splits * group * (head_dim + 2)


def attention_decode_call(
    driver: Driver,
    q: Array,
    b: StepView,
    cache: Array,
    layer: int,
    scale: float,
    out: Array,
    workspace: Array,
    tuning: DecodeTuning | None = None,
) -> KernelCall:
    """q [R, H, E] bf16, cache [blocks, layers, 2, K, block_tokens, E] bf16 -> out [R, H, E] bf16, zeros for padding rows.

    workspace [words] uint32: zeros when first used, and left so where it matters; launches may share it, whatever their sizes, as long as
    they run one after the other.
    ValueError for arrays that do not fit together, or a workspace that is too small.
    """
    rows, heads, e = q.shape
    blocks, layers, _, kv_heads, block_tokens, _ = cache.shape
    group = heads // kv_heads
    for a, what in ((q, "queries"), (out, "attention's output"), (cache, "KV cache")):
        typed(a, BF16, what=what)
    shaped(out, q.shape, "attention's output")
    shaped(cache, (blocks, layers, 2, kv_heads, block_tokens, e), "KV cache")
    contiguous(q, out, cache, b.block_table, workspace)
    if heads != group * kv_heads or rows * kv_heads > MAX_PAIRS:
        raise ValueError(
            f"attention: {rows} rows, {heads} query and {kv_heads} key heads: a multiple, and at most {MAX_PAIRS} pairs"
        )
    t = tuning or choose(rows, kv_heads, group, e, driver.sm_count)
    need = MAX_PAIRS + _parts(rows, kv_heads, group, e, t)
    if workspace.shape[0] < need:
        raise ValueError(f"attention: a workspace of {workspace.shape[0]} words; {rows} rows need {need}")
    i32 = np.int32
    return KernelCall(
        attention_decode_spec(group, e, block_tokens, t),
        (t.workers * t.cluster, 1, 1),
        (32 * t.warps, 1, 1),
        (
            q,
            cache[:, layer],
            b.block_table,
            b.row_slot,
            b.positions,
            out,
            workspace[:MAX_PAIRS],
            words_as_floats(workspace[MAX_PAIRS:]),
            np.int64(cache.strides[0]),
            np.int64(cache.strides[2]),
            i32(rows),
            i32(kv_heads),
            i32(blocks),
            i32(b.block_table.shape[0]),
            i32(b.block_table.shape[1]),
            i32(t.min_tiles),
            i32(t.max_splits),
            np.uint32((1 << 32) // t.workers if t.workers > 1 else (1 << 32) - 1),
            np.float32(scale * math.log2(math.e)),
        ),
        smem=t.smem(rows, group, e),
        cluster=t.cluster,
    )


def words_as_floats(words: Array) -> Array:
    """The same memory, seen as float32."""
    return Array(words.ptr, words.shape, F32, words.strides, words.owner)


def attention_decode_twin(call: KernelCall, args: list[Any]) -> None:
    """Writes `out`."""
    q, pages, block_table, row_slot, positions, out, *_, scale = args
    attend(q, pages, block_table, row_slot, positions, float(scale) / math.log2(math.e), out)


TWINS = {"attention_decode": attention_decode_twin}


def representative_specs() -> list[KernelSpec]:
    """From one row to many, at the shapes of 1B and 8B models; other head sizes, groups and blocks."""
    shapes = [(1, 8, 4, 64, 32), (8, 8, 4, 64, 32), (64, 8, 4, 64, 32), (1, 8, 4, 128, 32), (64, 8, 4, 128, 32)]
    shapes += [(4, 3, 3, 64, 16), (1, 8, 1, 80, 16), (64, 8, 8, 96, 32), (1, 8, 7, 112, 64), (64, 8, 16, 128, 32)]
    return [
        attention_decode_spec(group, e, tokens, choose(rows, kv_heads, group, e, 132))
        for rows, kv_heads, group, e, tokens in shapes
    ]
