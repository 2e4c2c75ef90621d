"""The twin of `gemv.cu` in NumPy: float64 sums, rounded to bf16 where the kernel rounds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from graphrt.kernels import abi
from graphrt.kernels.cuda.driver import KernelCall

BF16 = ml_dtypes.bfloat16
RESIDUAL, QKV, GATE_UP, HEAD, PLAIN = range(5)


def bf16(a: NDArray[Any]) -> NDArray[np.float64]:
    """Rounded to bf16, to nearest even, by way of float32."""
    return a.astype(np.float32).astype(BF16).astype(np.float64)


def gemv_twin(call: KernelCall, args: list[Any]) -> None:
    """Writes `out` (and the cache) in place, from arrays of the shapes that the call was built with."""
    w, bias, norm, act, out, picked, positions, row_slot, block_table, cos, sin, cache, _counter, n, *rest = args
    layer, heads, kv_heads, eps = (rest[i] for i in (2, 4, 5, 8))
    mode, d = call.spec["mode"], call.spec["d"]
    if mode == RESIDUAL:
        a = act.reshape(call.spec["rows"], -1).astype(np.float64)
    else:
        if mode == HEAD:
            live = picked != abi.PAD
            act = np.where(live[:, None], act[np.where(live, picked, 0)], 0)
        wide = act.astype(np.float64)
        a = bf16(wide * norm.astype(np.float64))
        scale = 1 / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + float(eps))
    product = a @ w[:n, :d].astype(np.float64).T
    if mode != RESIDUAL:
        product *= scale  # one number a row: it is as good after the product, and rounds no more
    if bias is not None:
        product += bias
    if mode == RESIDUAL:
        out[:] = out + product
    elif mode == GATE_UP:
        gate, up = np.split(product, 2, axis=1)
        out[:] = (gate / (1 + np.exp(-gate)) * up).astype(np.float32).astype(BF16)
    elif mode == QKV:
        e = call.spec["head_dim"]
        qkv = product.reshape(len(product), heads + 2 * kv_heads, e)
        rotate(qkv[:, : heads + kv_heads], positions, cos, sin)
        out[:] = qkv[:, :heads].astype(np.float32).astype(BF16)
        append(qkv[:, heads:], positions, row_slot, block_table, cache, int(layer))
    else:
        out[:] = product


def rotate(x: NDArray[np.float64], positions: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> None:
    """Rotate x [R, heads, E] in place, first half against second half."""
    half = x.shape[2] // 2
    c, s = cos[positions][:, None].astype(np.float64), sin[positions][:, None].astype(np.float64)
    first, second = x[..., :half].copy(), x[..., half:].copy()
    x[..., :half] = first * c - second * s
    x[..., half:] = second * c + first * s


def append(
    kv: NDArray[np.float64],
    positions: NDArray[Any],
    row_slot: NDArray[Any],
    block_table: NDArray[Any],
    cache: NDArray[Any],
    layer: int,
) -> None:
    """Store kv [R, 2K, E], keys first, at each row's position; nothing for a padding row."""
    kv_heads, tokens = cache.shape[3], cache.shape[4]
    for r, slot in enumerate(row_slot):
        if slot != abi.PAD:
            block = block_table[slot, positions[r] // tokens]
            place = cache[block, layer, :, :, positions[r] % tokens]  # [2, K, E]
            place[:] = kv[r].reshape(2, kv_heads, -1).astype(np.float32).astype(cache.dtype)
