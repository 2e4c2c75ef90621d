"""What a model keeps between steps, declared by name: paged caches, window rings, and state.

A cache is block-major: one block holds all its layers and heads in one contiguous range, so that moving a block to the host or to another
server is one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Paged:
    """Grows with the sequence. Array [blocks, *planes, block_tokens / ratio, width]; `ratio` tokens share one entry."""

    name: str
    planes: tuple[int, ...]  # such as (layers, 2, kv_heads)
    width: int
    dtype: str = "float32"
    ratio: int = 1

    def block_shape(self, block_tokens: int) -> tuple[int, ...]:
        """Shape of one block; ValueError when the ratio does not divide the block."""
        if block_tokens % self.ratio:
            raise ValueError(
                f"cache {self.name}: blocks of {block_tokens} tokens are not divisible by the ratio {self.ratio}"
            )
        return (*self.planes, block_tokens // self.ratio, self.width)

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one block."""
        return int(np.prod(self.block_shape(block_tokens))) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Ring:
    """The last `length` entries of each slot. Array [slots, length, *shape]; the model writes entry position % length."""

    name: str
    length: int
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class State:
    """A fixed piece of memory of each slot. Array [slots, *shape]."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class KVSpec:
    """All caches of a model; names are unique."""

    caches: tuple[Paged | Ring | State, ...]

    def __post_init__(self) -> None:
        names = [c.name for c in self.caches]
        if len(set(names)) != len(names):
            raise ValueError(f"cache names are not unique: {names}")

    @property
    def prefix_reusable(self) -> bool:
        """Whether blocks alone restore a sequence. Rings and states would need snapshots beside them."""
        return all(isinstance(c, Paged) for c in self.caches)

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one block over all paged caches."""
        return sum(c.block_bytes(block_tokens) for c in self.caches if isinstance(c, Paged))

    def slot_bytes(self) -> int:
        """Bytes of one slot's rings and states."""
        total = 0
        for c in self.caches:
            if not isinstance(c, Paged):
                shape = (c.length, *c.shape) if isinstance(c, Ring) else c.shape
                total += int(np.prod(shape)) * np.dtype(c.dtype).itemsize
        return total

    def array_shape(
        self, cache: Paged | Ring | State, *, blocks: int, slots: int, block_tokens: int
    ) -> tuple[int, ...]:
        """Shape of a cache's array for these sizes."""
        if isinstance(cache, Paged):
            return (blocks, *cache.block_shape(block_tokens))
        return (slots, cache.length, *cache.shape) if isinstance(cache, Ring) else (slots, *cache.shape)

    def layout(self, block_tokens: int) -> str:
        """A text that is equal for equal block layouts: part of the prefix hash."""
        return ";".join(repr(c) for c in self.caches) + f";{block_tokens}"
