"""The twin of `gemm64.cu` in NumPy: float64 sums, rounded to bf16 where the kernel rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrt.kernels import abi
from graphrt.kernels.cuda.driver import KernelCall
from graphrt.kernels.cuda.gemv_twin import BF16, append, bf16, rotate

RESIDUAL, QKV, GATE_UP, PLAIN = range(4)


def gemm64_twin(call: KernelCall, args: list[Any]) -> None:
    """Writes `out` (and the cache) in place, from arrays of the shapes that the call was built with."""
    w, bias, norm, act, out, picked, positions, row_slot, block_table, cos, sin, cache, rows, n, *rest = args
    layer, heads, kv_heads, eps = (rest[i] for i in (2, 4, 5, 6))
    mode, d = call.spec["mode"], call.spec["d"]
    if not call.spec["norm"]:
        a = act.reshape(int(rows), d).astype(np.float64)
    else:
        if picked is not None:
            live = picked != abi.PAD
            act = np.where(live[:, None], act[np.where(live, picked, 0)], 0)
        wide = act.astype(np.float64)
        a = bf16(wide * norm.astype(np.float64))
    product = a @ w[:n, :d].astype(np.float64).T
    if call.spec["norm"]:  # its scale is one number a row: it is as good after the product, and rounds no more
        product /= np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + float(eps))
    if bias is not None:
        product += bias
    if mode == RESIDUAL:
        out[:] = out + product
    elif mode == GATE_UP:
        gate, up = np.split(product, 2, axis=1)
        with np.errstate(over="ignore"):  # exp of a very negative gate: silu is then 0
            out[:] = (gate / (1 + np.exp(-gate)) * up).astype(np.float32).astype(BF16)
    elif mode == QKV:
        qkv = product.reshape(len(product), heads + 2 * kv_heads, call.spec["head_dim"])
        rotate(qkv[:, : heads + kv_heads], positions, cos, sin)
        out[:] = qkv[:, :heads].astype(np.float32).astype(BF16)
        append(qkv[:, heads:], positions, row_slot, block_table, cache, int(layer))
    else:
        out[:] = product
