"""Which module runs which architecture, and how a model directory becomes a loaded model."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from graphrt.config import load_config
from graphrt.errors import ModelError
from graphrt.kernels.comm import OneRank
from graphrt.kernels.ops import Ops
from graphrt.memory import check_memory, size_text
from graphrt.models.base import LoadedModel, Model
from graphrt.weights import Tensors, open_checkpoint

MODULES = {"llama": "graphrt.models.llama", "qwen3": "graphrt.models.llama"}


def model_module(architecture: str) -> Model:
    """The module of an architecture; ModelError for an unknown one."""
    if architecture not in MODULES:
        raise ModelError(f"architecture {architecture!r} is not supported: {', '.join(sorted(MODULES))}")
    return cast(Model, importlib.import_module(MODULES[architecture]))


def load_model(
    model_dir: Path,
    ops: Ops,
    context: int,
    *,
    checkpoint: Tensors | None = None,
    other_bytes: int = 0,
    memory: int | None = None,
) -> LoadedModel:
    """Load a model directory.

    checkpoint: its weights, None for the directory's own. other_bytes: what the caller will take beside the weights, for the check that
    all fits. memory: the bytes that there are, None to ask this machine.
    """
    config = load_config(model_dir)
    model = model_module(config.architecture)
    checkpoint = checkpoint or open_checkpoint(model_dir)
    need = model.weight_bytes(ops, config, checkpoint)
    check_memory(
        need + other_bytes,
        f"{model_dir.name} (weights {size_text(need)}, KV {size_text(other_bytes)})",
        memory,
    )
    weights = model.load_weights(ops, config, checkpoint, context, OneRank())
    return LoadedModel(config, model.kv_spec(config, ops.kv_dtype), weights, model)
