"""Compile or load every kernel ahead of the first request."""

import numpy as np

from graphrt.kernels.cpu import attention, elementwise, linear, sampling
from graphrt.kernels.cpu.jit import F32, I32


def warm_up() -> None:
    """Compile all kernels, or load them from numba's cache on disk (about a second), and run each once on tiny inputs.

    numba keeps the cache beside this package, or, where that is read-only, in the user's cache directory; NUMBA_CACHE_DIR
    overrides both.
    """
    x, out = np.ones((2, 32), F32), np.zeros((2, 32), F32)
    rows, bias = np.zeros(2, I32), np.zeros(32, F32)
    for dtype in (F32, linear.BF16):
        w = linear.pack_linear(np.ones((32, 32), dtype))
        linear.linear(x, w, bias, out, accumulate=True)
        elementwise.embed(rows, np.ones((4, 32), dtype), out)
    elementwise.rms_norm(x, bias, 1e-5, out)
    elementwise.silu_mul(np.ones((2, 64), F32), out)
    heads, cache = np.ones((2, 4, 8), F32), np.zeros((1, 1, 2, 2, 16, 8), F32)
    slots, table = np.array([0, -1], I32), np.zeros((1, 1), I32)
    elementwise.rope(heads, rows, np.ones((4, 4), F32), np.ones((4, 4), F32))
    attention.kv_append(heads[:, :2].copy(), heads[:, 2:].copy(), rows, slots, table, cache, 0)
    attention.attention(heads, rows, slots, table, cache, 0, 1.0, np.zeros_like(heads))
    sampling.argmax_rows(x, rows)
    sampling.gumbel_noise(1, 2, 32)
