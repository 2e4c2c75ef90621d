"""Weights for a model of which there is only the shape: speed does not depend on what they say."""

from __future__ import annotations

import hashlib
from typing import Any

from graphrt.kernels.random_tensor import RandomTensor

STD = 0.02  # as models are initialised: activations stay of ordinary size through any depth


class DummyCheckpoint:
    """Stands for a `Checkpoint`: every tensor that is asked for exists, norms are ones, all else is random by its name."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        """A bf16 `RandomTensor` of this shape."""
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little")
        if "norm" in name:
            return RandomTensor(tuple(shape), seed, std=0.0, mean=1.0)
        return RandomTensor(tuple(shape), seed, std=STD)

    def fingerprint(self) -> bytes:
        """32 bytes that tell seeds apart."""
        return hashlib.sha256(f"dummy {self.seed}".encode()).digest()
