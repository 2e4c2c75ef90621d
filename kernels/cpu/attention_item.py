"""Attention of a few neighbouring rows to one KV head, over paged keys and values.

A query's positions are taken in tiles of 64 and parts of 512, both at absolute borders. Inside a part the softmax runs on
(online); parts are merged in order. So a query's arithmetic is fixed by its own position alone: neighbours only share the loads,
and a tile that is not complete for all of them is weighted row by row, so that nobody multiplies a later token's value by 0.

Keys are turned into columns once per tile, which makes scores, like values, the product of fma_tile.py.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from graphrt.kernels.cpu.fma_tile import (
    REST_ROWS,
    ask,
    columns8_more,
    columns16_more,
    columns32,
    columns32_more,
    tile_rows,
)
from graphrt.kernels.cpu.memory import load_f32, load_i32, store_f32
from graphrt.kernels.cpu.softmax_tile import STATE_BYTES, TOKENS, exp_f32, scale_floats, softmax_sum, softmax_tile
from graphrt.kernels.cpu.transpose import turn_f32

PART = 512
LINE = TOKENS * 4  # bytes of a query's scores
HEAD = 64  # bytes before the sums in a record: maximum, sum of exponentials
TURN = 16  # tokens turned at a time
QUERIES = 24  # of a group, where the model has no more heads to a KV head than that


class Shape(NamedTuple):
    """What all items of a call have in common. Addresses are int64; `cache` already points at the layer."""

    q: int
    positions: int
    row_slot: int
    block_table: int
    blocks_per_slot: int
    cache: int
    block_bytes: int
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    out: int
    scale: np.float32


def scratch_bytes(queries: int, head_dim: int) -> int:
    """What one item needs of a thread's scratch."""
    keys = head_dim * LINE + TURN * head_dim * 4
    return keys + queries * (LINE + STATE_BYTES + 2 * HEAD + 3 * head_dim * 4)


@njit
def _token(s: Shape, slot: int, token: int, kv: int, head: int) -> int:
    """Address of a token's key (kv 0) or value (kv 1); the rest of its block follows."""
    block = load_i32(s.block_table + (slot * s.blocks_per_slot + token // s.block_tokens) * 4)
    inside = (kv * s.kv_heads + head) * s.block_tokens + token % s.block_tokens
    return s.cache + block * s.block_bytes + inside * s.head_dim * 4


@njit
def _copy(source: int, target: int, nbytes: int) -> None:
    for i in range(0, nbytes, 4):
        store_f32(target + i, load_f32(source + i))


@njit
def _ask_ahead(s: Shape, slot: int, token: int, end: int, kv: int, head: int, count: int) -> None:
    """Have keys or values fetched that the next tile will read; blocks lie far apart, so hardware does not foresee them."""
    if token < end:
        address = _token(s, slot, token, kv, head)
        for i in range(0, count * s.head_dim * 4, 64):
            ask(address + i)


@njit
def _turn_keys(s: Shape, slot: int, head: int, t0: int, count: int, end: int, columns: int, stage: int) -> None:
    """Keys of tokens t0 .. t0 + count as columns [head_dim, 64]. Columns beyond `count` are garbage."""
    size = s.head_dim * 4
    for g in range(0, count, TURN):
        _ask_ahead(s, slot, t0 + TOKENS + g, end, 0, head, min(TURN, s.block_tokens))
        if s.block_tokens >= TURN:
            source = _token(s, slot, t0 + g, 0, head)
        else:
            source = stage
            for j in range(0, min(TURN, count - g), s.block_tokens):
                _copy(_token(s, slot, t0 + g + j, 0, head), stage + j * size, s.block_tokens * size)
        turn_f32(source, size, columns + g * 4, LINE, s.head_dim // 8)


@njit
def _add_values(
    s: Shape, slot: int, head: int, t0: int, count: int, end: int, p: int, sums: int, stride: int, queries: int
) -> None:
    """sums[i, :] += p[i, t] * value[t0 + t, :] for t < count in order, for `queries` rows of p and sums."""
    most = tile_rows()
    size = s.head_dim * 4
    run = min(s.block_tokens, TOKENS)
    for t in range(0, count, run):
        k = min(run, count - t)
        _ask_ahead(s, slot, t0 + TOKENS + t, end, 1, head, run)
        value = _token(s, slot, t0 + t, 1, head)
        for i in range(0, queries, most):
            rows = min(most, queries - i)
            weight = p + i * LINE + t * 4
            target = sums + i * stride
            d = 0
            while d + 32 <= s.head_dim:
                columns32_more(weight, LINE, value + d * 4, size, target + d * 4, stride, k, rows)
                d += 32
            for j in range(0, rows if d < s.head_dim else 0, REST_ROWS):
                few = min(REST_ROWS, rows - j)
                p_j, value_d, target_d = weight + j * LINE, value + d * 4, target + j * stride + d * 4
                if d + 16 <= s.head_dim:
                    columns16_more(p_j, LINE, value_d, size, target_d, stride, k, few)
                    value_d += 64
                    target_d += 64
                if s.head_dim % 16:
                    columns8_more(p_j, LINE, value_d, size, target_d, stride, k, few)


@njit
def reset(record: int, head_dim: int) -> None:
    store_f32(record, -float("inf"))
    for i in range(4, HEAD + head_dim * 4, 4):
        store_f32(record + i, 0.0)


@njit
def merge(total: int, part: int, head_dim: int) -> None:
    """Take the record of a part into the total of all parts before it."""
    old, new = load_f32(total), load_f32(part)
    top = max(old, new)
    keep, add = exp_f32(old - top), exp_f32(new - top)
    store_f32(total, top)
    store_f32(total + 4, load_f32(total + 4) * keep + load_f32(part + 4) * add)
    for i in range(HEAD, HEAD + head_dim * 4, 4):
        store_f32(total + i, load_f32(total + i) * keep + load_f32(part + i) * add)


@njit
def finish(s: Shape, row: int, head: int, total: int) -> None:
    """Write out[row, head] from its total."""
    target = s.out + (row * s.heads + head) * s.head_dim * 4
    whole = load_f32(total + 4)
    for i in range(0, s.head_dim * 4, 4):
        store_f32(target + i, load_f32(total + HEAD + i) / whole)


@njit
def _attend_part(s: Shape, row: int, rows: int, head: int, part: int, queries: int, records: int, memory: int) -> None:
    """One part for a group: scaled queries [rows * group, head_dim] to records. A row that ends before the part is untouched."""
    group = s.heads // s.kv_heads
    slot = load_i32(s.row_slot + row * 4)
    position = load_i32(s.positions + row * 4)
    size = s.head_dim * 4
    stride = HEAD + size
    many = rows * group
    most = tile_rows()
    columns = memory
    stage = columns + s.head_dim * LINE
    scores = stage + TURN * size
    states = scores + many * LINE
    for i in range(many):
        reset(records + i * stride, s.head_dim)
        reset(states + i * STATE_BYTES, 16)
    end = position + rows
    for t0 in range(part * PART, min((part + 1) * PART, end), TOKENS):
        loaded = min(TOKENS, end - t0)
        _turn_keys(s, slot, head, t0, loaded, end, columns, stage)
        for i in range(0, many, most):
            for c in range(0, loaded, 32):
                target = scores + i * LINE + c * 4
                columns32(
                    queries + i * size, size, columns + c * 4, LINE, target, LINE, s.head_dim, min(most, many - i)
                )
        for i in range(many):
            count = min(TOKENS, position + i // group + 1 - t0)
            if count > 0:
                factor = softmax_tile(scores + i * LINE, count, states + i * STATE_BYTES)
                if factor != 1.0:
                    scale_floats(records + i * stride + HEAD, s.head_dim // 8, factor)
        if position + 1 - t0 >= TOKENS:
            _add_values(s, slot, head, t0, TOKENS, end, scores, records + HEAD, stride, many)
        else:
            for i in range(rows):
                count = min(TOKENS, position + i + 1 - t0)
                if count > 0:
                    first = i * group
                    sums = records + first * stride + HEAD
                    _add_values(s, slot, head, t0, count, end, scores + first * LINE, sums, stride, group)
    for i in range(many):
        store_f32(records + i * stride, load_f32(states + i * STATE_BYTES))
        store_f32(records + i * stride + 4, softmax_sum(states + i * STATE_BYTES))


@njit
def attend_item(s: Shape, row: int, rows: int, head: int, part: int, partial: int, memory: int) -> None:
    """One work item: rows row .. row + rows (one slot, positions counting up by 1) against KV head `head`.

    part >= 0: only that part, left as records at `partial`. part < 0: all parts, and the result is written.
    """
    group = s.heads // s.kv_heads
    size = s.head_dim * 4
    stride = HEAD + size
    many = rows * group
    queries = memory
    records = queries + many * size
    totals = records + many * stride
    rest = totals + many * stride
    for i in range(rows):
        source = s.q + ((row + i) * s.heads + head * group) * size
        for d in range(0, group * size, 4):
            store_f32(queries + i * group * size + d, load_f32(source + d) * s.scale)
    if part >= 0:
        _attend_part(s, row, rows, head, part, queries, partial, rest)
        return
    position = load_i32(s.positions + row * 4)
    for i in range(many):
        reset(totals + i * stride, s.head_dim)
    for p in range((position + rows - 1) // PART + 1):
        _attend_part(s, row, rows, head, p, queries, records, rest)
        for i in range(many):
            if position + i // group >= p * PART:
                merge(totals + i * stride, records + i * stride, s.head_dim)
    for i in range(many):
        finish(s, row + i // group, head * group + i % group, totals + i * stride)
