"""Calls and twins of `elementwise.cu`: what touches each element once."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrt.kernels import abi
from graphrt.kernels.array import Array
from graphrt.kernels.cuda.checks import BF16, F32, contiguous, shaped, typed
from graphrt.kernels.cuda.driver import KernelCall
from graphrt.kernels.cuda.jit import KernelSpec

THREADS = 256
MAX_ROWS = 65535  # a grid's extent along y


def elementwise_spec(entry: str, width: int) -> KernelSpec:
    """Four values a thread where rows are a multiple of that, else one."""
    return KernelSpec.of("elementwise.cu", entry, **{entry: 1}, vec=1 if width % 4 else 4)


def _call(entry: str, rows: int, width: int, *args: Array | None) -> KernelCall:
    contiguous(*args)
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"{entry}: {rows} rows, must be from 1 to {MAX_ROWS}")
    spec = elementwise_spec(entry, width)
    return KernelCall(spec, (-(-width // (THREADS * spec["vec"])), rows, 1), (THREADS, 1, 1), (*args, np.int32(width)))


def embed(tokens: Array, table: Array, out: Array) -> KernelCall:
    """out[r] = table[tokens[r]]. [R] int32, [V, D] bf16 -> [R, D] float32."""
    typed(table, BF16, what="embedding table")
    typed(out, F32, what="embeddings")
    shaped(out, (tokens.shape[0], table.shape[1]), "embeddings")
    return _call("embed", tokens.shape[0], table.shape[1], tokens, table, out)


def gather_rows(x: Array, rows: Array, out: Array) -> KernelCall:
    """out[i] = x[rows[i]], zeros where rows[i] is PAD. [R, D] float32, [S] int32 -> [S, D] float32."""
    typed(x, F32, what="rows to gather from")
    typed(out, F32, what="gathered rows")
    shaped(out, (rows.shape[0], x.shape[1]), "gathered rows")
    return _call("gather_rows", rows.shape[0], x.shape[1], x, rows, out)


def add(x: Array, out: Array) -> KernelCall:
    """out += x. [R, D] float32, both."""
    typed(x, F32, what="summand")
    typed(out, F32, what="sum")
    shaped(out, x.shape, "sum")
    return _call("add", x.shape[0], x.shape[1], x, out)


def add_bias(bias: Array, out: Array) -> KernelCall:
    """out[r] += bias. [n], [R, n] float32."""
    typed(bias, F32, what="bias")
    typed(out, F32, what="product")
    shaped(bias, out.shape[1:], "bias")
    return _call("add_bias", out.shape[0], out.shape[1], bias, out)


def silu_mul(gate_up: Array, out: Array, bias: Array | None = None) -> KernelCall:
    """out = silu(gate) · up, gate_up first added to `bias` [2F] where there is one. [R, 2F] float32 -> [R, F] bf16."""
    typed(gate_up, F32, what="gate and up")
    typed(out, BF16, what="hidden units")
    rows, width = out.shape
    shaped(gate_up, (rows, 2 * width), "gate and up")
    return _call("silu_mul", rows, width, gate_up, bias, out)


def embed_twin(call: KernelCall, args: list[Any]) -> None:
    """Widens: exact."""
    tokens, table, out, _ = args
    out[:] = table[tokens]


def gather_rows_twin(call: KernelCall, args: list[Any]) -> None:
    """Copies: exact."""
    x, rows, out, _ = args
    live = rows != abi.PAD
    out[~live] = 0
    out[live] = x[rows[live]]


def add_twin(call: KernelCall, args: list[Any]) -> None:
    """One float32 addition an element: exact."""
    x, out, _ = args
    out += x


def add_bias_twin(call: KernelCall, args: list[Any]) -> None:
    """One float32 addition an element: exact."""
    bias, out, _ = args
    out += bias


def silu_mul_twin(call: KernelCall, args: list[Any]) -> None:
    """float64 inside, rounded once."""
    gate_up, bias, out, _ = args
    wide = gate_up.astype(np.float64) + (0 if bias is None else bias)
    gate, up = np.split(wide, 2, axis=1)
    with np.errstate(over="ignore"):  # exp of a very negative gate: silu is then 0
        out[:] = (gate / (1 + np.exp(-gate)) * up).astype(np.float32).astype(BF16)


TWINS = {
    "embed": embed_twin,
    "gather_rows": gather_rows_twin,
    "add": add_twin,
    "add_bias": add_bias_twin,
    "silu_mul": silu_mul_twin,
}


def representative_specs() -> list[KernelSpec]:
    """Each kernel, for rows that are a multiple of four values and for others."""
    return [elementwise_spec(entry, width) for entry in TWINS for width in (2048, 33)]
