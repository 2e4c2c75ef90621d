"""Tables of rotary position embeddings: plain, linear, Llama-3 and YaRN scaling.

Everything is computed in float32 in the order of the reference implementation (Hugging Face `modeling_rope_utils`), because at position
8000 an angle differs by 5e-4 between float32 and float64, and models are trained with the former.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from graphrt.config import RopeConfig

F32 = NDArray[np.float32]


def rope_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[F32, F32]:
    """(cos, sin), each [positions, head_dim/2] float32, with the attention factor multiplied in."""
    inv_freq, factor = inverse_frequencies(rope, head_dim)
    angles = np.arange(positions, dtype=np.float32)[:, None] * inv_freq[None, :]
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[F32, float]:
    """(angle per position of each pair [head_dim/2], factor on cos and sin)."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (np.float32(1) / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: F32) -> F32:
    """Low frequencies are divided by the factor, high ones kept, those between blended (Llama 3.1 model code)."""
    wavelength = 2 * math.pi / plain
    longest, shortest = (
        rope.original_max_position / rope.low_freq_factor,
        rope.original_max_position / rope.high_freq_factor,
    )
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = np.where(wavelength > longest, plain / rope.factor, plain)
    between = (wavelength <= longest) & (wavelength >= shortest)
    return np.where(between, blended, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, plain: F32, head_dim: int) -> tuple[F32, float]:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions between interpolated and plain frequencies, and a softmax temperature."""

    def dimension(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    inv_freq = plain / np.float32(rope.factor) * ramp + plain * (1 - ramp)
    return inv_freq.astype(np.float32), _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(scale: float, m: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return mscale(rope.factor, 1.0)
