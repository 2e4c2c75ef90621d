"""Calls and twin of `rms_norm.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.checks import BF16, F32, contiguous, shaped, typed
from graphrt.kernels.cuda.driver import KernelCall
from graphrt.kernels.cuda.jit import KernelSpec

WARP = 32
MAX_WIDTH = 16384


def rms_norm_spec(width: int, x_bf16: bool, out_bf16: bool) -> KernelSpec:
    """A warp a row up to 512 values, else a block. ValueError for a width that no thread block holds in registers."""
    if width % 4 or not 4 <= width <= MAX_WIDTH:
        raise ValueError(f"rms_norm over {width} values: must be a multiple of 4 up to {MAX_WIDTH}")
    threads = 512 if width > 8192 else 256
    return KernelSpec.of(
        "rms_norm.cu",
        "rms_norm",
        width=width,
        threads=threads,
        group=WARP if width <= 512 else threads,
        x_bf16=x_bf16,
        out_bf16=out_bf16,
    )


def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> KernelCall:
    """out = x / sqrt(mean(x²) + eps) · weight along the last axis. [..., D] float32 or bf16 each; `out` may be `x`."""
    contiguous(x, weight, out)
    typed(x, F32, BF16, what="rows to normalise")
    typed(out, F32, BF16, what="normalised rows")
    shaped(out, x.shape, "normalised rows")
    width = x.shape[-1]
    shaped(weight, (width,), "norm weight")
    rows = int(np.prod(x.shape[:-1]))
    spec = rms_norm_spec(width, x.dtype == BF16, out.dtype == BF16)
    threads = spec["threads"]
    return KernelCall(
        spec,
        (-(-rows // (threads // spec["group"])), 1, 1),
        (threads, 1, 1),
        (x, weight, out, np.int32(rows), np.float32(eps)),
    )


def rms_norm_twin(call: KernelCall, args: list[Any]) -> None:
    """float64 inside, rounded once."""
    x, weight, out, _, eps = args
    wide = x.astype(np.float64)
    scale = 1 / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + float(eps))
    out[:] = (wide * scale * weight).astype(np.float32).astype(out.dtype)


TWINS = {"rms_norm": rms_norm_twin}


def representative_specs() -> list[KernelSpec]:
    """Heads and rows, the widest too, in all element types."""
    specs = [rms_norm_spec(width, False, True) for width in (64, 576, 2048, 8192, MAX_WIDTH)]
    return [*specs, rms_norm_spec(128, True, True), rms_norm_spec(2048, True, False), rms_norm_spec(128, False, False)]
