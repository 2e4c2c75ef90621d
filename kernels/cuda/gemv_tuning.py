"""How `gemv.cu` cuts its work: one record that is template argument, cache key and tuning result at once."""

from __future__ import annotations

from dataclasses import dataclass

SMEM_SHARED = 74 * 1024  # bytes a block, so that three grids fit on a multiprocessor side by side
SMEM_PORTABLE = 98 * 1024
STATIC = 1536  # bytes, at most, of what the kernel declares itself


@dataclass(frozen=True, slots=True)
class GemvTuning:
    """unit: rows of w that a block takes at a time: 4, 8 or 16. stage_k: columns of a stage; stages: of the ring. warps: that multiply.

    blocks_per_sm: of the grid. min_blocks: that the compiler must leave registers for.
    window: stages in flight at a time.
    """

    unit: int
    stage_k: int
    stages: int
    warps: int = 8
    blocks_per_sm: int = 1
    min_blocks: int = 3
    window: int = 2

    def smem(self, rows: int, k: int) -> int:
        """Bytes of dynamic shared memory: the ring, and the activations as bf16."""
        return self.stages * self.stage_bytes + rows * (2 * k + 64)

    def fixed_units(self, k: int) -> int:
        """Units of each block that need no ticket: those that the ring holds when a launch begins."""
        return max(self.stages // -(-k // self.stage_k), 1)

    @property
    def stage_bytes(self) -> int:
        return self.unit * (2 * self.stage_k + 64)


def choose(rows: int, n: int, k: int) -> GemvTuning:
    """Stages of 16 KB, as many as leave room for two neighbours in time, all in flight.

    Measured on one H200 over a chain of all products of a 1.2B model: 8 rows by 1024 columns 654 µs, by 2048 658 µs, with two
    stages in flight at a time 713 µs; 16 rows 792 µs, 4 rows 755 µs. Grids of unequal size cost more than either: blocks of one grid
    then share a multiprocessor. ValueError when the activations alone fill a block's memory.
    """
    for longest in (1024, 512):
        stage_k = min(longest, -(-k // 64) * 64)
        size = GemvTuning(8, stage_k, 1).stage_bytes
        for budget in (SMEM_SHARED, SMEM_PORTABLE):
            stages = min((budget - STATIC - rows * (2 * k + 64)) // size, 8)
            if stages >= 3:
                return GemvTuning(8, stage_k, stages, window=stages)
    raise ValueError(f"{rows} rows of {k} columns leave no room for weights in {SMEM_PORTABLE} bytes")
