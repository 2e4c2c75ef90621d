"""The twin of both attention kernels: one row after the other in float64, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphrt.kernels import abi


def attend(
    q: NDArray[Any],
    pages: NDArray[Any],
    block_table: NDArray[Any],
    row_slot: NDArray[Any],
    positions: NDArray[Any],
    scale: float,
    out: NDArray[Any],
) -> None:
    """out[r] = softmax(q[r] · kᵀ · scale) · v over tokens 0..positions[r] of row r's slot; zeros for padding rows.

    q, out: [R, H, E]. pages: a layer of the cache, [blocks, 2, K, block_tokens, E]. Reads nothing of the cache beyond those tokens.
    """
    kv_heads, block_tokens, e = pages.shape[2:]
    for r, slot in enumerate(row_slot):
        if slot == abi.PAD:
            out[r] = 0
            continue
        n = int(positions[r]) + 1
        blocks = block_table[slot, : -(-n // block_tokens)]
        kv = pages[blocks].transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, e)[:, :, :n].astype(np.float64)
        scores = np.einsum("kge,kne->kgn", q[r].reshape(kv_heads, -1, e).astype(np.float64), kv[0]) * float(scale)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = np.einsum("kgn,kne->kge", p, kv[1]) / p.sum(axis=-1, keepdims=True)
        out[r] = attended.reshape(out.shape[1:]).astype(np.float32)
