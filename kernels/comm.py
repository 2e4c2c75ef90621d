"""Ranks of one model. A row-parallel operation sums over them before it adds the residual."""

from __future__ import annotations

from typing import Protocol

from graphrt.kernels.array import Array


class Communicator(Protocol):
    """A group of ranks that hold slices of the same weights."""

    rank: int
    size: int

    def all_reduce(self, x: Array) -> None:
        """Replace `x` by its sum over all ranks, in rank order, on every rank."""


class OneRank:
    """The group of one: nothing to sum."""

    rank = 0
    size = 1

    def all_reduce(self, x: Array) -> None:
        """`x` is its own sum."""
