"""Made-up attention: sequences in a scattered, poisoned cache, rows that look at them, and what each row must get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from graphrt.kernels import abi
from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import Driver

BF16 = np.dtype(ml_dtypes.bfloat16)
Row = tuple[int, int] | None  # a sequence and a position in it; None for padding


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of one layer and the cache's blocks."""

    kv_heads: int
    group: int
    head_dim: int
    block_tokens: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


class Case:
    """Arrays on the host. Whatever no row may read is NaN: padding queries, cache beyond a sequence, blocks of nobody, other layers."""

    def __init__(self, rng: np.random.Generator, shape: Shape, rows: Sequence[Row], layers: int = 2) -> None:
        self.shape, self.rows, self.layer = shape, list(rows), int(rng.integers(layers))
        self.scale = float(shape.head_dim**-0.5)
        lengths: dict[int, int] = {}
        for row in rows:
            if row is not None:
                lengths[row[0]] = max(lengths.get(row[0], 0), row[1] + 1)
        need = {s: -(-n // shape.block_tokens) for s, n in lengths.items()}
        blocks = sum(need.values()) + 3
        order = iter(rng.permutation(blocks))
        slots = iter(rng.permutation(len(lengths) + 2))
        self.block_table = rng.integers(
            0, blocks, (len(lengths) + 2, max(need.values(), default=1) + 2), dtype=np.int32
        )
        self.cache = np.full((blocks, layers, 2, shape.kv_heads, shape.block_tokens, shape.head_dim), np.nan, BF16)
        self.kv: dict[int, NDArray[np.float64]] = {}
        self.slot_of: dict[int, int] = {}
        for s, n in lengths.items():
            ids = [next(order) for _ in range(need[s])]
            self.slot_of[s] = int(next(slots))
            self.block_table[self.slot_of[s], : need[s]] = ids
            padded = np.full((2, shape.kv_heads, need[s] * shape.block_tokens, shape.head_dim), np.nan, np.float32)
            padded[:, :, :n] = rng.standard_normal((2, shape.kv_heads, n, shape.head_dim), dtype=np.float32)
            tokens = padded.astype(BF16)
            self.kv[s] = tokens[:, :, :n].astype(np.float64)
            pages = tokens.reshape(2, shape.kv_heads, need[s], shape.block_tokens, shape.head_dim)
            self.cache[ids, self.layer] = pages.transpose(2, 0, 1, 3, 4)
        self.row_slot = np.array([abi.PAD if r is None else self.slot_of[r[0]] for r in rows], np.int32)
        garbage = rng.integers(-(2**31), 2**31 - 1, len(rows), dtype=np.int32)
        self.positions = np.array([g if r is None else r[1] for r, g in zip(rows, garbage, strict=True)], np.int32)
        q = rng.standard_normal((len(rows), shape.heads, shape.head_dim), dtype=np.float32) * 2
        q[self.row_slot == abi.PAD] = np.nan
        self.q = q.astype(BF16)

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What each row must get, and how far a result may be from it: probabilities and results are rounded to bf16."""
        s = self.shape
        want = np.zeros((len(self.rows), s.kv_heads, s.group, s.head_dim))
        slack = np.zeros_like(want)
        for r, row in enumerate(self.rows):
            if row is None:
                continue
            k, v = self.kv[row[0]][:, :, : row[1] + 1]
            q = self.q[r].astype(np.float64).reshape(s.kv_heads, s.group, s.head_dim)
            scores = np.einsum("kge,kne->kgn", q, k) * self.scale
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            want[r] = np.einsum("kgn,kne->kge", p, v)
            slack[r] = 1.01 * 2**-8 * (np.einsum("kgn,kne->kge", p, np.abs(v)) + np.abs(want[r]))
        return want.reshape(self.q.shape), slack.reshape(self.q.shape)

    def check(self, got: NDArray[Any]) -> None:
        """Every value within its bounds, padding rows exactly zero."""
        want, slack = self.expected()
        error = np.abs(got.astype(np.float64) - want)
        wrong = ~(error <= slack)
        assert not wrong.any(), (
            f"{wrong.sum()} of {wrong.size} differ, first at {np.argwhere(wrong)[0].tolist()}: "
            f"{got[wrong][0]} for {want[wrong][0]}, rows {self.rows[:8]}"
        )


class OnDevice:
    """A case's arrays on a device, and the parts of a StepView that attention reads."""

    def __init__(self, driver: Driver, case: Case) -> None:
        def put(values: NDArray[Any]) -> Array:
            array = driver.alloc(values.shape, values.dtype)
            driver.upload(array, values)
            return array

        self.q, self.cache, self.out = put(case.q), put(case.cache), put(np.full(case.q.shape, np.nan, BF16))
        self.step: Any = SimpleNamespace(
            kind="decode",
            rows=len(case.rows),
            block_table=put(case.block_table),
            row_slot=put(case.row_slot),
            positions=put(case.positions),
        )


def decode_rows(lengths: Sequence[int]) -> list[Row]:
    """One row for each sequence, at its last token; 0 for padding."""
    return [(i, n - 1) if n else None for i, n in enumerate(lengths)]
