"""What a model is to the engine: its caches, its weights, its step. One file in this folder each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from graphrt.config import ModelConfig
from graphrt.kernels.array import Array
from graphrt.kernels.comm import Communicator
from graphrt.kernels.ops import Ops
from graphrt.kernels.step_state import StepView
from graphrt.kv_spec import KVSpec
from graphrt.weights import Tensors


class Model(Protocol):
    """The functions that a model's module exports."""

    def kv_spec(self, config: ModelConfig, dtype: str) -> KVSpec:
        """The caches it keeps between steps, of elements of the backend's type."""

    def weight_bytes(self, ops: Ops, config: ModelConfig, checkpoint: Tensors) -> int:
        """Memory that its weights take once loaded; asked before anything is loaded."""

    def load_weights(self, ops: Ops, config: ModelConfig, checkpoint: Tensors, context: int, comm: Communicator) -> Any:
        """Its weights in the backend's layout. ModelError for a missing tensor or a wrong shape."""

    def step(self, ops: Ops, w: Any, b: StepView) -> Array:
        """Run the rows of `b` through the model, append to the caches, and return the logits of its samples [S, V]."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights."""

    config: ModelConfig
    spec: KVSpec
    weights: Any
    model: Model
