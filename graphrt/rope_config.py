"""Rotary embedding settings, in both spellings that Hugging Face configurations use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from graphrt.errors import ModelError
from graphrt.jsonfile import Fields

RopeKind = Literal["default", "linear", "llama3", "yarn"]
_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. `original_max_position` is the context before scaling (llama3, yarn; else 0).

    `factor` is the resolved scaling (1 for "default"). `attention_factor`, `mscale` and `mscale_all_dim` are None where
    the file does not give them: yarn then derives the factor from `factor` alone.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


def parse_rope(config: Fields, max_position: int) -> RopeConfig:
    """Reads `rope_parameters` (new) or `rope_scaling` with `rope_theta` (old). ModelError on kinds not supported."""
    new = config.section("rope_parameters")
    old = config.section("rope_scaling")
    if new is not None and any(isinstance(v, dict) for v in new.values.values()):
        raise ModelError(f"{new.where} differ between kinds of layer, which is not supported")
    scaling = new or old or Fields({}, f"{config.where}: rope_parameters")
    theta = config.number("rope_theta", 1.0001, 1e12, 10000.0)
    theta = scaling.number("rope_theta", 1.0001, 1e12, theta)
    for where in (config, scaling):
        if where.number("partial_rotary_factor", 0, 1, 1.0) != 1.0:
            raise ModelError(f"{where.where}: partial_rotary_factor other than 1 is not supported")
    kind = scaling.string("rope_type", None) or scaling.string("type", "default")
    if kind not in _KINDS:
        raise ModelError(f"{scaling.where}: rope type {kind!r} is not supported, only {', '.join(_KINDS)}")
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=scaling.number("factor", 1, 1e4))
    original = scaling.integer("original_max_position_embeddings", 1, 1 << 30, None)
    if original is None:
        original = config.integer("original_max_position_embeddings", 1, 1 << 30, max_position)
    if kind == "llama3":
        low = scaling.number("low_freq_factor", 1e-6, 1e6)
        high = scaling.number("high_freq_factor", 1e-6, 1e6)
        if low >= high:
            raise ModelError(f"{scaling.where}: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
        return RopeConfig(
            "llama3",
            theta,
            factor=scaling.number("factor", 1, 1e4),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeConfig(
        cast(RopeKind, kind),
        theta,
        factor=scaling.number("factor", 1, 1e4, max(1.0, max_position / original)),
        original_max_position=original,
        # Zero means "not given" in files in circulation.
        beta_fast=scaling.number("beta_fast", 0, 1e6, 32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 0, 1e6, 1.0) or 1.0,
        mscale=scaling.number("mscale", 0, 100, None),
        mscale_all_dim=scaling.number("mscale_all_dim", 0, 100, None),
        attention_factor=scaling.number("attention_factor", 1e-6, 1e6, None),
        truncate=scaling.boolean("truncate", True),
    )
