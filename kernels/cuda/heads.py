"""Calls and twins of `heads.cu`: what happens to heads between the projection and attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.checks import BF16, F32, contiguous, shaped, typed
from graphrt.kernels.cuda.driver import KernelCall
from graphrt.kernels.cuda.gemv_twin import append, rotate
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.ops import HeadShape, Rope
from graphrt.kernels.step_state import StepView

THREADS = 256
MAX_HEAD = 256


def heads_spec(entry: str, head_dim: int, block_tokens: int = 32) -> KernelSpec:
    """ValueError for a head size that 32 lanes do not hold."""
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD:
        raise ValueError(f"{entry}: heads of {head_dim} values, must be a multiple of 8 up to {MAX_HEAD}")
    return KernelSpec.of("heads.cu", entry, **{entry: 1}, head_dim=head_dim, block_tokens=block_tokens)


def _call(entry: str, tasks: int, head_dim: int, block_tokens: int, *args: Array | np.generic | None) -> KernelCall:
    contiguous(*(a for a in args if isinstance(a, Array)))
    lanes = 1 << max(head_dim // 8 - 1, 0).bit_length()  # as heads.cu has it
    spec = heads_spec(entry, head_dim, block_tokens)
    return KernelCall(spec, (-(-tasks * lanes // THREADS), 1, 1), (THREADS, 1, 1), args)


def qkv_finish(
    qkv: Array,
    bias: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    rope: Rope,
    heads: HeadShape,
    b: StepView,
    cache: Array,
    q: Array,
) -> KernelCall:
    """qkv [R, (H + 2K)·E] float32, biased, heads normalised where weights are given, rotated: q [R, H, E] bf16, k and v to the cache.

    cache: [blocks, layers, 2, K, block_tokens, E] bf16. Padding rows leave no trace in it.
    """
    rows, h, kh, e = qkv.shape[0], heads.num_heads, heads.num_kv_heads, heads.head_dim
    typed(qkv, F32, what="projections")
    typed(q, BF16, what="queries")
    typed(cache, BF16, what="KV cache")
    shaped(qkv, (rows, (h + 2 * kh) * e), "projections")
    shaped(q, (rows, h, e), "queries")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("qkv_finish: queries and keys are both normalised, or neither is")
    return _call(
        "qkv_finish",
        rows * (h + 2 * kh),
        e,
        cache.shape[4],
        qkv,
        bias,
        q_norm,
        k_norm,
        rope.cos,
        rope.sin,
        b.positions,
        b.row_slot,
        b.block_table,
        q,
        cache,
        np.int32(rows),
        np.int32(h),
        np.int32(kh),
        np.int32(b.block_table.shape[1]),
        np.int32(heads.layer),
        np.int32(cache.shape[1]),
        np.float32(eps),
    )


def rope(x: Array, positions: Array, table: Rope) -> KernelCall:
    """Rotate x [R, heads, E] float32 in place, first half against second half."""
    typed(x, F32, what="heads to rotate")
    rows, heads, e = x.shape
    return _call("rope", rows * heads, e, 32, x, positions, table.cos, table.sin, np.int32(rows), np.int32(heads))


def split_heads(qkv: Array, q: Array, k: Array, v: Array) -> KernelCall:
    """[R, (H + 2K)·E] float32 -> q [R, H, E] bf16, k and v [R, K, E] float32."""
    typed(q, BF16, what="queries")
    rows, h, e = q.shape
    kh = k.shape[1]
    return _call("split_heads", rows * (h + 2 * kh), e, 32, qkv, q, k, v, np.int32(rows), np.int32(h), np.int32(kh))


def kv_append(k: Array, v: Array, b: StepView, cache: Array, layer: int) -> KernelCall:
    """Store k, v [R, K, E] float32 at each row's position in its slot's blocks, as bf16. Padding rows write nowhere."""
    typed(k, F32, what="keys")
    typed(v, F32, what="values")
    typed(cache, BF16, what="KV cache")
    rows, kh, e = k.shape
    return _call(
        "kv_append",
        rows * 2 * kh,
        e,
        cache.shape[4],
        k,
        v,
        b.positions,
        b.row_slot,
        b.block_table,
        cache,
        np.int32(rows),
        np.int32(kh),
        np.int32(b.block_table.shape[1]),
        np.int32(layer),
        np.int32(cache.shape[1]),
    )


def qkv_finish_twin(call: KernelCall, args: list[Any]) -> None:
    """float64 inside; q, k and v are rounded once."""
    qkv, bias, q_norm, k_norm, cos, sin, positions, row_slot, table, q, cache, rows, h, kh, _, layer, _, eps = args
    wide = qkv.astype(np.float64) + (0 if bias is None else bias)
    wide = wide.reshape(int(rows), int(h) + 2 * int(kh), -1)
    if q_norm is not None:
        for part, weight in ((wide[:, :h], q_norm), (wide[:, h : h + kh], k_norm)):
            part *= weight / np.sqrt((part * part).mean(axis=-1, keepdims=True) + float(eps))
    rotate(wide[:, : h + kh], positions, cos, sin)
    q[:] = wide[:, :h].astype(np.float32).astype(BF16)
    append(wide[:, h:], positions, row_slot, table, cache, int(layer))


def rope_twin(call: KernelCall, args: list[Any]) -> None:
    """float64 inside, rounded once."""
    x, positions, cos, sin, _, _ = args
    wide = x.astype(np.float64)
    rotate(wide, positions, cos, sin)
    x[:] = wide


def split_heads_twin(call: KernelCall, args: list[Any]) -> None:
    """k and v exact, q rounded to bf16."""
    qkv, q, k, v, rows, h, kh = args
    parts = qkv.reshape(int(rows), int(h) + 2 * int(kh), -1)
    q[:], k[:], v[:] = parts[:, :h].astype(BF16), parts[:, h : h + kh], parts[:, h + kh :]


def kv_append_twin(call: KernelCall, args: list[Any]) -> None:
    """Rounded to bf16."""
    k, v, positions, row_slot, table, cache, _, _, _, layer, _ = args
    append(np.concatenate([k, v], axis=1).astype(np.float64), positions, row_slot, table, cache, int(layer))


TWINS = {"qkv_finish": qkv_finish_twin, "rope": rope_twin, "split_heads": split_heads_twin, "kv_append": kv_append_twin}


def representative_specs() -> list[KernelSpec]:
    """Each kernel for the usual head sizes and an odd one."""
    specs = [heads_spec(entry, e) for entry in TWINS for e in (64, 128)]
    return [*specs, *(heads_spec("qkv_finish", e, tokens) for e, tokens in ((80, 16), (96, 16), (256, 64)))]
