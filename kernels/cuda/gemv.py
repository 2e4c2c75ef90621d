"""Products with one or two rows, fused with what stands around them in a decoder layer: `gemv.cu`, its calls and its twin.

counter: [1] uint32 on the device, zero before a launch and zero after it; launches that may overlap in time need different ones.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.gemv_tuning import GemvTuning, choose
from graphrt.kernels.cuda.gemv_twin import gemv_twin
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Rope
from graphrt.kernels.step_state import StepView

MAX_ROWS = 2
MAX_NORMED = 8192  # columns of a row that a block's threads hold in registers
TWINS = {"gemv": gemv_twin}


class Mode(IntEnum):
    """What the kernel does around the product; see gemv.cu."""

    RESIDUAL = 0
    QKV = 1
    GATE_UP = 2
    HEAD = 3
    PLAIN = 4


def gemv_spec(
    mode: Mode, rows: int, k: int, d: int, tuning: GemvTuning, head_dim: int = 64, block_tokens: int = 32
) -> KernelSpec:
    """rows 1 or 2; k: padded columns of w; d: true columns. Only QKV looks at head_dim and block_tokens."""
    if mode is not Mode.QKV:
        head_dim, block_tokens = 64, 32  # one kernel for all models
    return KernelSpec.of(
        "gemv.cu",
        "gemv",
        mode=mode,
        rows=rows,
        k=k,
        d=d,
        head_dim=head_dim,
        block_tokens=block_tokens,
        unit=tuning.unit,
        stage_k=tuning.stage_k,
        stages=tuning.stages,
        warps=tuning.warps,
        min_blocks=tuning.min_blocks,
        window=min(tuning.window, tuning.stages),
    )


def fits(mode: Mode, rows: int, w: Linear, head_dim: int = 64) -> bool:
    """Whether the kernel takes this shape; what it does not take goes another way."""
    k = w.data.shape[1]
    if rows > MAX_ROWS or w.k % 8 or (mode is not Mode.RESIDUAL and k > MAX_NORMED):
        return False
    if mode is Mode.GATE_UP and w.n % 16:
        return False
    return mode is not Mode.QKV or head_dim % 16 == 0


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
    tuning: GemvTuning | None = None,
    counter: Array,
) -> KernelCall:
    k = w.data.shape[1]
    tuning = tuning or choose(rows, w.n, k)
    block_tokens = cache.shape[4] if cache is not None else 32
    spec = gemv_spec(mode, rows, k, w.k, tuning, heads.head_dim if heads else 64, block_tokens)
    units = -(-w.n // tuning.unit)
    grid = min(units, driver.sm_count * tuning.blocks_per_sm)
    fixed = min(tuning.fixed_units(k), units // grid)
    i32 = np.int32
    return KernelCall(
        spec,
        (grid, 1, 1),
        (32 * (tuning.warps + 2), 1, 1),
        (
            w.data,
            w.bias,
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
            counter,
            i32(w.n),
            i32(units),
            i32(b.block_table.shape[1] if b else 0),
            i32(heads.layer if heads else 0),
            i32(cache.shape[1] if cache is not None else 0),
            i32(heads.num_heads if heads else 0),
            i32(heads.num_kv_heads if heads else 0),
            i32(fixed),
            i32(units - fixed * grid + grid),  # every block draws in vain once
            np.float32(eps),
        ),
        smem=tuning.smem(rows, k),
    )


def gemv_norm_qkv_rope_append(
    driver: Driver,
    counter: Array,
    x: Array,
    w: AttentionWeights,
    eps: float,
    rope: Rope,
    heads: HeadShape,
    b: StepView,
    cache: Array,
    out: Array,
    tuning: GemvTuning | None = None,
) -> KernelCall:
    """x [R, D] float32 -> q [R, H, E] bf16 in `out`, k and v in the cache. Not for models that normalise heads."""
    return _call(
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
        counter=counter,
    )


def gemv_norm_linear(
    driver: Driver,
    counter: Array,
    x: Array,
    norm: Array,
    eps: float,
    w: Linear,
    out: Array,
    tuning: GemvTuning | None = None,
) -> KernelCall:
    """x [R, D] float32 -> w · norm(x) [R, n] float32."""
    return _call(driver, Mode.PLAIN, w, x, out, x.shape[0], norm=norm, eps=eps, tuning=tuning, counter=counter)


def gemv_residual(
    driver: Driver, counter: Array, act: Array, w: Linear, residual: Array, tuning: GemvTuning | None = None
) -> KernelCall:
    """residual [R, n] float32 += w · act [R, k] bf16."""
    return _call(driver, Mode.RESIDUAL, w, act, residual, act.shape[0], tuning=tuning, counter=counter)


def gemv_norm_gate_up_silu(
    driver: Driver, counter: Array, x: Array, w: MlpWeights, eps: float, out: Array, tuning: GemvTuning | None = None
) -> KernelCall:
    """x [R, D] float32 -> silu(gate) · up [R, F] bf16."""
    return _call(
        driver, Mode.GATE_UP, w.gate_up, x, out, x.shape[0], norm=w.norm, eps=eps, tuning=tuning, counter=counter
    )


def gemv_norm_head(
    driver: Driver,
    counter: Array,
    x: Array,
    rows: Array,
    norm: Array,
    eps: float,
    head: Linear,
    out: Array,
    tuning: GemvTuning | None = None,
) -> KernelCall:
    """x [R, D] float32, rows [S] int32 -> logits [S, V] float32; those of a PAD row are those of zeros."""
    return _call(
        driver, Mode.HEAD, head, x, out, rows.shape[0], norm=norm, eps=eps, picked=rows, tuning=tuning, counter=counter
    )


def representative_specs() -> list[KernelSpec]:
    """Each mode and row count at the shapes of a 1B model, and an odd one."""
    specs = []
    for rows in (1, 2):
        for mode, n, k in (
            (Mode.RESIDUAL, 2048, 8192),
            (Mode.QKV, 3072, 2048),
            (Mode.GATE_UP, 16384, 2048),
            (Mode.HEAD, 128256, 2048),
            (Mode.PLAIN, 960, 576),
            (Mode.RESIDUAL, 4096, 14336),
        ):
            specs.append(gemv_spec(mode, rows, k, k, choose(rows, n, k)))
    specs.append(gemv_spec(Mode.QKV, 2, 256, 240, choose(2, 400, 256), head_dim=80, block_tokens=16))
    return specs
