"""Attention over the paged cache: which of the two kernels takes a step's rows.

A decode step's rows are of different sequences, so every key is read for one row and the bytes count. A prompt's rows share their keys,
so the products count.
"""

from __future__ import annotations

from graphrt.kernels.array import Array
from graphrt.kernels.cuda import attention_decode, attention_prefill
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.step_state import StepKind, StepView


def workspace_words(kind: StepKind, rows: int, heads: int, kv_heads: int, head_dim: int, sm_count: int) -> int:
    """Words [uint32], zero at first, that the launch takes. Launches of all kinds and sizes may share the largest."""
    if kind == "decode":
        return attention_decode.attention_decode_workspace(rows, heads, kv_heads, head_dim, sm_count)
    return attention_prefill.attention_prefill_workspace(rows, heads, kv_heads, head_dim, sm_count)


def fits(heads: int, kv_heads: int, head_dim: int, block_tokens: int) -> bool:
    """Whether both kernels take a model of this shape, with a cache of such blocks."""
    shape = (heads // kv_heads, head_dim, block_tokens)
    return heads % kv_heads == 0 and attention_decode.fits(*shape) and attention_prefill.fits(*shape)


def paged_attention(
    driver: Driver, q: Array, b: StepView, cache: Array, layer: int, scale: float, out: Array, workspace: Array
) -> KernelCall:
    """q [R, H, E] bf16 -> out [R, H, E] bf16: each row attends to positions 0..own of its slot; zeros for padding rows.

    cache: [blocks, layers, 2, K, block_tokens, E] bf16. workspace: at least `workspace_words` of uint32.
    """
    call = attention_decode.attention_decode_call if b.kind == "decode" else attention_prefill.attention_prefill_call
    return call(driver, q, b, cache, layer, scale, out, workspace)
