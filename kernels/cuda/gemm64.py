"""Products with 3 to 64 rows, fused with what stands around them in a decoder layer: calls of `gemm64.cu`."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda import heads as head_kernels
from graphrt.kernels.cuda.checks import BF16, F32, contiguous, typed
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.gemm64_choice import choose
from graphrt.kernels.cuda.gemm64_tuning import Gemm64Tuning, clusters_of
from graphrt.kernels.cuda.gemm64_twin import gemm64_twin
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Rope
from graphrt.kernels.step_state import StepView

MAX_ROWS = 64
TWINS = {"gemm64": gemm64_twin}


class Mode(IntEnum):
    """What the kernel does after the product; see gemm64.cu."""

    RESIDUAL = 0
    QKV = 1
    GATE_UP = 2
    PLAIN = 3


def padded_rows(rows: int) -> int:
    """Rows that the kernel multiplies; those beyond `rows` are nobody's."""
    return -(-rows // 8) * 8


def gemm64_spec(
    mode: Mode,
    normed: bool,
    rows: int,
    k: int,
    d: int,
    tuning: Gemm64Tuning,
    head_dim: int = 64,
    block_tokens: int = 32,
) -> KernelSpec:
    """k: padded columns of w; d: true columns. Only QKV looks at head_dim and block_tokens."""
    if mode is not Mode.QKV:
        head_dim, block_tokens = 64, 32  # one kernel for all models
    return KernelSpec.of(
        "gemm64.cu",
        "gemm64",
        mode=mode,
        norm=normed,
        rows=padded_rows(rows),
        k=k,
        d=d,
        head_dim=head_dim,
        block_tokens=block_tokens,
        cluster=tuning.cluster,
        unit=tuning.unit,
        warps=tuning.warps,
        stage_k=tuning.stage_k,
        stages=tuning.stages,
        act_slots=tuning.act_slots,
        prefetch=tuning.prefetch,
        min_blocks=tuning.min_blocks,
        bulk=tuning.bulk,
        evict_first=tuning.evict_first,
    )


def tuning_of(
    driver: Driver, mode: Mode, normed: bool, rows: int, w: Linear, head_dim: int = 64, bulk: bool | None = None
) -> Gemm64Tuning:
    """The cut that is used where none is given; bulk: its kind, None for the usual. ValueError when the shape does not fit."""
    max_unit = 16 if mode is Mode.QKV and head_dim % 32 else 32
    return choose(normed, padded_rows(rows), w.n, w.data.shape[1], driver.smem_per_block, max_unit, bulk)


def fits(driver: Driver, mode: Mode, normed: bool, rows: int, w: Linear, head_dim: int = 64) -> bool:
    """Whether the kernel takes this shape; what it does not take goes another way."""
    if rows > MAX_ROWS or w.k % 8 or (mode is Mode.GATE_UP and w.n % 2) or (mode is Mode.QKV and head_dim % 16):
        return False
    try:
        tuning_of(driver, mode, normed, rows, w, head_dim)
    except ValueError:
        return False
    return True


def _call(
    driver: Driver,
    mode: Mode,
    w: Linear,
    act: Array,
    out: Array,
    rows: int,
    *,
    norm: Array | None = None,
    eps: float = 0.0,
    picked: Array | None = None,
    heads: HeadShape | None = None,
    rope: Rope | None = None,
    b: StepView | None = None,
    cache: Array | None = None,
    bias: bool = True,
    tuning: Gemm64Tuning | None = None,
) -> KernelCall:
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"gemm64: {rows} rows, must be from 1 to {MAX_ROWS}")
    contiguous(act, out, w.data)
    typed(act, BF16 if norm is None else F32, what="activations")
    typed(out, BF16 if mode in (Mode.QKV, Mode.GATE_UP) else F32, what="results")
    k = w.data.shape[1]
    head_dim = heads.head_dim if heads else 64
    tuning = tuning or tuning_of(driver, mode, norm is not None, rows, w, head_dim)
    block_tokens = cache.shape[4] if cache is not None else 32
    spec = gemm64_spec(mode, norm is not None, rows, k, w.k, tuning, head_dim, block_tokens)
    units = -(-(w.n // 2) // (tuning.unit // 2)) if mode is Mode.GATE_UP else -(-w.n // tuning.unit)
    i32 = np.int32
    return KernelCall(
        spec,
        (clusters_of(driver.sm_count, tuning.cluster, units) * tuning.cluster, 1, 1),
        (tuning.threads, 1, 1),
        (
            w.data,
            w.bias if bias else None,
            norm,
            act,
            out,
            picked,
            b.positions if b else None,
            b.row_slot if b else None,
            b.block_table if b else None,
            rope.cos if rope else None,
            rope.sin if rope else None,
            cache,
            i32(rows),
            i32(w.n),
            i32(units),
            i32(b.block_table.shape[1] if b else 0),
            i32(heads.layer if heads else 0),
            i32(cache.shape[1] if cache is not None else 0),
            i32(heads.num_heads if heads else 0),
            i32(heads.num_kv_heads if heads else 0),
            np.float32(eps),
        ),
        smem=tuning.smem(padded_rows(rows)),
        cluster=tuning.cluster,
    )


def gemm64_norm_qkv_rope_append(
    driver: Driver,
    x: Array,
    w: AttentionWeights,
    eps: float,
    rope: Rope,
    heads: HeadShape,
    b: StepView,
    cache: Array,
    out: Array,
    qkv: Array | None = None,
    tuning: Gemm64Tuning | None = None,
) -> list[KernelCall]:
    """x [R, D] float32 -> q [R, H, E] bf16 in `out`, k and v in the cache.

    With `qkv`, a temporary [R, (H + 2K)·E] float32, the projection goes there and a second kernel does the rest: for models that normalise
    heads, and head sizes that are no multiple of 16. ValueError where it is needed and missing.
    """
    if qkv is None and (w.q_norm is not None or heads.head_dim % 16):
        raise ValueError("heads that are normalised, or of an odd size, need a place for their projections")
    if qkv is None:
        call = _call(
            driver,
            Mode.QKV,
            w.qkv,
            x,
            out,
            x.shape[0],
            norm=w.norm,
            eps=eps,
            heads=heads,
            rope=rope,
            b=b,
            cache=cache,
            tuning=tuning,
        )
        return [call]
    return [
        _call(driver, Mode.PLAIN, w.qkv, x, qkv, x.shape[0], norm=w.norm, eps=eps, bias=False, tuning=tuning),
        head_kernels.qkv_finish(qkv, w.qkv.bias, w.q_norm, w.k_norm, eps, rope, heads, b, cache, out),
    ]


def gemm64_residual(
    driver: Driver, act: Array, w: Linear, residual: Array, tuning: Gemm64Tuning | None = None
) -> list[KernelCall]:
    """residual [R, n] float32 += w · act [R, k] bf16."""
    return [_call(driver, Mode.RESIDUAL, w, act, residual, residual.shape[0], tuning=tuning)]


def gemm64_linear(
    driver: Driver, act: Array, w: Linear, out: Array, tuning: Gemm64Tuning | None = None
) -> list[KernelCall]:
    """out [R, n] float32 = w · act [R, k] bf16."""
    return [_call(driver, Mode.PLAIN, w, act, out, out.shape[0], tuning=tuning)]


def gemm64_norm_gate_up_silu(
    driver: Driver, x: Array, w: MlpWeights, eps: float, out: Array, tuning: Gemm64Tuning | None = None
) -> list[KernelCall]:
    """x [R, D] float32 -> silu(gate) · up [R, F] bf16."""
    return [_call(driver, Mode.GATE_UP, w.gate_up, x, out, x.shape[0], norm=w.norm, eps=eps, tuning=tuning)]


def gemm64_norm_head(
    driver: Driver,
    x: Array,
    rows: Array,
    norm: Array,
    eps: float,
    head: Linear,
    out: Array,
    tuning: Gemm64Tuning | None = None,
) -> list[KernelCall]:
    """x [R, D] float32, rows [S] int32 -> logits [S, V] float32; those of a PAD row are those of zeros."""
    return [_call(driver, Mode.PLAIN, head, x, out, rows.shape[0], norm=norm, eps=eps, picked=rows, tuning=tuning)]


def representative_specs() -> list[KernelSpec]:
    """Each mode, number of rows and kind of copies at the shapes of a 1B model, and odd ones."""
    large, small = 227 * 1024, 99 * 1024
    products = [
        (Mode.GATE_UP, True, 16384, 2048),
        (Mode.RESIDUAL, False, 2048, 8192),
        (Mode.QKV, True, 3072, 2048),
        (Mode.PLAIN, True, 128256, 2048),
    ]

    def spec(mode: Mode, normed: bool, rows: int, n: int, d: int, limit: int, bulk: bool, e: int = 64) -> KernelSpec:
        k = -(-d // 32) * 32
        cut = choose(normed, rows, n, k, limit, 16 if e % 32 else 32, bulk)
        return gemm64_spec(mode, normed, rows, k, d, cut, e, 16)

    specs = [spec(Mode.GATE_UP, True, rows, 16384, 2048, large, True) for rows in (16, 48)]
    for bulk in (True, False):
        specs += [
            spec(*p[:2], rows, *p[2:], large, bulk) for rows in ((8, 32, 64) if bulk else (8, 64)) for p in products
        ]
        specs += [
            spec(Mode.RESIDUAL, False, 32, 4096, 14336, large, bulk),
            spec(Mode.PLAIN, False, 64, 960, 576, small, bulk),
            spec(Mode.QKV, True, 8, 400, 240, large, bulk, 80),
            spec(Mode.GATE_UP, True, 64, 28672, 4096, small, bulk),
        ]
    return specs
