"""Paged attention and the cache append. One kernel for decode, prefill and everything between.

Rows next to each other in one sequence form groups that share loads of keys and values. A work item is (group, KV head), or,
when those are too few for the threads, (group, KV head, part of 512 positions), merged afterwards in the same order as one
thread would. Results have the same bits for any batch, chunking and number of threads. See attention_item.py.

Bound by reading keys and values for decode, by fma throughput for prefill.
"""

from functools import cache as once
from typing import Any

import numpy as np
from numba import cfunc, njit

from graphrt.kernels.cpu.attention_item import (
    HEAD,
    PART,
    QUERIES,
    Shape,
    attend_item,
    finish,
    merge,
    reset,
    scratch_bytes,
)
from graphrt.kernels.cpu.jit import BODY, F32, I32, REAL, U8, WORD, check, reads, source_stamp, writes
from graphrt.kernels.cpu.memory import load_f32, load_i64, store_f32, store_i64
from graphrt.kernels.cpu.team import ARGS, run, shared_team, take

ITEM_WORDS = 5  # first row, rows, KV head, part or -1, index of the first partial record
PARTIAL_BYTES = 64 << 20  # more partial records than this are not worth the parallelism

OK, BAD_SLOT, BAD_POSITION, BAD_BLOCK = range(4)
_COMPLAINT = {
    BAD_SLOT: "row_slot: a row's slot lies beyond the block table",
    BAD_POSITION: "positions: a row's position is negative or beyond its block table",
    BAD_BLOCK: "block_table: a block that a row needs lies outside the cache",
}


@njit
def _attend(control: int, who: int) -> None:
    a = control + ARGS
    memory = load_i64(a + 8) + who * load_i64(a + 16)
    items, plan, partial = load_i64(a + 24), load_i64(a + 32), load_i64(a + 40)
    s = Shape(
        load_i64(a + 48), load_i64(a + 56), load_i64(a + 64), load_i64(a + 72), load_i64(a + 80), load_i64(a + 88),
        load_i64(a + 96), load_i64(a + 104), load_i64(a + 112), load_i64(a + 120), load_i64(a + 128), load_i64(a + 136),
        load_f32(a),
    )  # fmt: skip
    while True:
        first, last = take(control, items)
        if first == last:
            return
        for item in range(first, last):
            words = plan + item * ITEM_WORDS * 8
            record = partial + load_i64(words + 32) * (HEAD + s.head_dim * 4)
            row, rows = load_i64(words), load_i64(words + 8)
            attend_item(s, row, rows, load_i64(words + 16), load_i64(words + 24), record, memory)


@njit
def _groups(
    positions: Any, row_slot: Any, block_table: Any, blocks: int, tokens: int, most: int, groups: Any
) -> tuple[int, int]:
    """Fill groups [., 2] with (first row, rows). Returns their number, or -1, and what is wrong."""
    count = 0
    previous = -1
    for row in range(row_slot.shape[0]):
        slot, position = row_slot[row], positions[row]
        if slot < 0:
            previous = -1
            continue
        if slot >= block_table.shape[0]:
            return -1, BAD_SLOT
        if position < 0 or position >= block_table.shape[1] * tokens:
            return -1, BAD_POSITION
        if slot == previous and position == positions[row - 1] + 1 and groups[count - 1, 1] < most:
            groups[count - 1, 1] += 1
            known = position // tokens
        else:
            groups[count, 0], groups[count, 1] = row, 1
            count += 1
            known = 0
        for block in range(known, position // tokens + 1):
            if block_table[slot, block] < 0 or block_table[slot, block] >= blocks:
                return -1, BAD_BLOCK
        previous = slot
    return count, OK


@njit
def _plan(
    groups: Any, count: int, positions: Any, kv_heads: int, group: int, split: bool, plan: Any
) -> tuple[int, int]:
    """Fill plan [., 5]. Returns the numbers of items and of partial records. Long groups come first: they should not end last."""
    items, records = 0, 0
    for g in range(count - 1, -1, -1):
        row, rows = groups[g, 0], groups[g, 1]
        parts = (positions[row] + rows - 1) // PART + 1 if split else 1
        for head in range(kv_heads):
            for part in range(parts):
                plan[items, 0], plan[items, 1], plan[items, 2] = row, rows, head
                plan[items, 3] = part if split else -1
                plan[items, 4] = records
                records += rows * group if split else 0
                items += 1
    return items, records


@njit
def _merge_all(s: Shape, positions: Any, plan: Any, items: int, partial: int, total: int) -> None:
    """Merge the parts of every query in order and write the results."""
    group = s.heads // s.kv_heads
    stride = HEAD + s.head_dim * 4
    for item in range(items):
        if plan[item, 3] != 0:
            continue
        row, rows, head = plan[item, 0], plan[item, 1], plan[item, 2]
        for i in range(rows * group):
            reset(total, s.head_dim)
            for part in range(positions[row + i // group] // PART + 1):
                merge(total, partial + (plan[item + part, 4] + i) * stride, s.head_dim)
            finish(s, row + i // group, head * group + i % group, total)


@once
def _compiled() -> tuple[Any, Any, Any]:
    stamp = source_stamp()

    @cfunc(BODY, cache=True)
    def body(control: int, who: int) -> None:
        if stamp:
            _attend(control, who)

    paging = (reads(I32, 1), reads(I32, 1), reads(I32, 2))
    words = (WORD,) * 5

    @njit(
        WORD(
            *words, writes(U8, 1), WORD, WORD, reads(F32, 3), *paging, reads(F32, 6), WORD, REAL, writes(F32, 3), WORD
        ),
        nogil=True,
        cache=True,
    )
    def enter(
        control: int, workers: int, function: int, scratch: int, gap: int, space: Any, most_items: int, most_records: int,
        q: Any, positions: Any, row_slot: Any, block_table: Any, cache: Any, layer: int, scale: float, out: Any, most_rows: int,
    ) -> int:  # fmt: skip
        if not stamp:
            return OK
        rows, heads, head_dim = q.shape
        blocks, layers, _, kv_heads, tokens, _ = cache.shape
        group = heads // kv_heads
        words = space[: space.size // 8 * 8].view(np.int64)
        groups = words[: 2 * rows].reshape((rows, 2))
        plan = words[2 * rows : 2 * rows + most_items * ITEM_WORDS].reshape((most_items, ITEM_WORDS))
        partial = (space.ctypes.data + (2 * rows + most_items * ITEM_WORDS) * 8 + 63) // 64 * 64
        count, wrong = _groups(positions, row_slot, block_table, blocks, tokens, most_rows, groups)
        if wrong != OK:
            return wrong
        for row in range(rows):
            if row_slot[row] < 0:
                out[row] = 0.0
        few = workers > 0 and count * kv_heads < 4 * (workers + 1)
        split_items, split_records = 0, 0
        for g in range(count):
            parts = (positions[groups[g, 0]] + groups[g, 1] - 1) // PART + 1
            split_items += parts * kv_heads
            split_records += parts * heads * groups[g, 1]
        split = few and split_items > count * kv_heads and split_items <= most_items and split_records < most_records
        items, records = _plan(groups, count, positions, kv_heads, group, split, plan)
        block_bytes = layers * 2 * kv_heads * tokens * head_dim * 4
        s = Shape(
            q.ctypes.data, positions.ctypes.data, row_slot.ctypes.data, block_table.ctypes.data, block_table.shape[1],
            cache.ctypes.data + layer * 2 * kv_heads * tokens * head_dim * 4, block_bytes,
            heads, kv_heads, head_dim, tokens, out.ctypes.data, np.float32(scale),
        )  # fmt: skip
        a = control + ARGS
        store_f32(a, s.scale)
        store_i64(a + 8, scratch)
        store_i64(a + 16, gap)
        store_i64(a + 24, items)
        store_i64(a + 32, plan.ctypes.data)
        store_i64(a + 40, partial)
        store_i64(a + 48, s.q)
        store_i64(a + 56, s.positions)
        store_i64(a + 64, s.row_slot)
        store_i64(a + 72, s.block_table)
        store_i64(a + 80, s.blocks_per_slot)
        store_i64(a + 88, s.cache)
        store_i64(a + 96, s.block_bytes)
        store_i64(a + 104, s.heads)
        store_i64(a + 112, s.kv_heads)
        store_i64(a + 120, s.head_dim)
        store_i64(a + 128, s.block_tokens)
        store_i64(a + 136, s.out)
        run(control, function, workers if items > 1 else 0)
        if split:
            _merge_all(s, positions, plan, items, partial, partial + records * (HEAD + head_dim * 4))
        return OK

    @njit(WORD(reads(F32, 3), reads(F32, 3), *paging, writes(F32, 6), WORD), cache=True)
    def append(k: Any, v: Any, positions: Any, row_slot: Any, block_table: Any, cache: Any, layer: int) -> int:
        if not stamp:
            return OK
        tokens = cache.shape[4]
        for row in range(row_slot.shape[0]):
            slot, position = row_slot[row], positions[row]
            if slot < 0:
                continue
            if slot >= block_table.shape[0]:
                return BAD_SLOT
            if position < 0 or position >= block_table.shape[1] * tokens:
                return BAD_POSITION
            block = block_table[slot, position // tokens]
            if block < 0 or block >= cache.shape[0]:
                return BAD_BLOCK
            for head in range(k.shape[1]):
                for d in range(k.shape[2]):
                    cache[block, layer, 0, head, position % tokens, d] = k[row, head, d]
                    cache[block, layer, 1, head, position % tokens, d] = v[row, head, d]
        return OK

    return enter, body, append


def _check_paging(
    rows: int, positions: np.ndarray, row_slot: np.ndarray, block_table: np.ndarray, cache: np.ndarray, layer: int
) -> None:
    check("positions", positions, I32, (rows,))
    check("row_slot", row_slot, I32, (rows,))
    if block_table.ndim != 2 or cache.ndim != 6:
        raise ValueError(f"want block_table of 2 and cache of 6 axes, have {block_table.ndim} and {cache.ndim}")
    check("block_table", block_table, I32, block_table.shape)
    check("cache", cache, F32, (*cache.shape[:2], 2, *cache.shape[3:]))
    tokens, head_dim = cache.shape[4], cache.shape[5]
    if tokens & (tokens - 1) or head_dim % 8:
        raise ValueError(
            f"cache: block_tokens must be a power of two, head_dim a multiple of 8, have {tokens}, {head_dim}"
        )
    if not 0 <= layer < cache.shape[1]:
        raise ValueError(f"layer: want 0 to {cache.shape[1] - 1}, have {layer}")


def kv_append(
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
    row_slot: np.ndarray,
    block_table: np.ndarray,
    cache: np.ndarray,
    layer: int,
) -> None:
    """Write keys and values k, v float32 [R, KH, hd] of a step's rows into the paged cache.

    Row r goes to token positions[r] of the sequence in slot row_slot[r] (both int32 [R]); a row with a negative slot is padding
    and writes nowhere. block_table int32 [slots, blocks a slot], cache float32 [blocks, layers, 2, KH, block tokens, hd].
    Raises ValueError when a shape, dtype or layout does not fit, or a row points outside the table or the cache.
    """
    rows = k.shape[0]
    _check_paging(rows, positions, row_slot, block_table, cache, layer)
    shape = (rows, cache.shape[3], cache.shape[5])
    check("k", k, F32, shape)
    check("v", v, F32, shape)
    wrong = _compiled()[2](k, v, positions, row_slot, block_table, cache, layer)
    if wrong:
        raise ValueError(_COMPLAINT[wrong])


def attention(
    q: np.ndarray,
    positions: np.ndarray,
    row_slot: np.ndarray,
    block_table: np.ndarray,
    cache: np.ndarray,
    layer: int,
    scale: float,
    out: np.ndarray,
) -> None:
    """out[r, h] = softmax(scale * q[r, h] . keys) @ values over positions 0..positions[r] of the row's sequence.

    q and out float32 [R, H, hd], H a multiple of the cache's KH; the rest as in `kv_append`. A row with a negative slot is
    padding: its output is 0 and nothing is read for it. A row's result depends on nothing but its query, its position and the
    keys and values up to it. Raises ValueError like `kv_append`, and where heads are too many or too long for the scratch.
    """
    _check_paging(q.shape[0], positions, row_slot, block_table, cache, layer)
    rows, heads, head_dim = q.shape
    kv_heads = cache.shape[3]
    check("q", q, F32, (rows, heads, cache.shape[5]))
    check("out", out, F32, q.shape)
    if heads % kv_heads:
        raise ValueError(f"q: {heads} heads are no multiple of the cache's {kv_heads}")
    team = shared_team()
    group = heads // kv_heads
    most_rows = max(1, QUERIES // group)
    if scratch_bytes(most_rows * group, head_dim) > team.SCRATCH:
        raise ValueError(f"q: {group} heads of {head_dim} to a KV head need more scratch than {team.SCRATCH} bytes")
    threads = team.threads
    parts = block_table.shape[1] * cache.shape[4] // PART + 1
    most_items = max(rows * kv_heads, 4 * threads * parts)
    record = HEAD + head_dim * 4
    most_records = min(most_items * min(rows, most_rows) * group + 1, PARTIAL_BYTES // record)
    enter, body, _ = _compiled()
    with team.lock:
        space = team.space(rows * 16 + most_items * ITEM_WORDS * 8 + 64 + most_records * record)
        wrong = enter(
            team.control, team.workers, body.address, team.scratch, team.SCRATCH, space, most_items, most_records,
            q, positions, row_slot, block_table, cache, layer, scale, out, most_rows,
        )  # fmt: skip
    if wrong:
        raise ValueError(_COMPLAINT[wrong])
