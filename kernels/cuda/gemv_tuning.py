"""How `gemv.cu` cuts its work: one record that is template argument, cache key and tuning result at once."""

from __future__ import annotations

from dataclasses import dataclass

SMEM_SHARED = 74 * 1024  # bytes a block, so that three grids fit on a multiprocessor side by side
SMEM_PORTABLE = 98 * 1024
STATIC = 1536  # bytes, at most, of what the kernel declares itself


@dataclass(frozen=True, slots=True)
class GemvTuning:
    """unit: rows of w that a block takes at a time, 8 or 16. stage_k: columns of a stage; stages: of the ring. warps: that multiply.

    blocks_per_sm: of the grid. min_blocks: that the compiler must leave registers for. prefetch: stages asked into L2 beyond the ring.
    window: stages in flight at a time.
    """

    unit: int
    stage_k: int
    stages: int
    warps: int = 8
    blocks_per_sm: int = 1
    min_blocks: int = 3
    prefetch: int = 0
    window: int = 2

    def smem(self, rows: int, k: int) -> int:
        """Bytes of dynamic shared memory: the ring, and the activations as bf16."""
        return self.stages * self.stage_bytes + rows * (2 * k + 64)

    @property
    def stage_bytes(self) -> int:
        return self.unit * (2 * self.stage_k + 64)


def choose(rows: int, n: int, k: int) -> GemvTuning:
    """The longest stages of which two fit: memory is read fastest in long runs, and two in flight a block keep it busy.

    Measured on one H200 over a chain of all products of a 1.2B model: stages of 2048 columns 679 µs, of 1024 715 µs, of 512
    930 µs; 16 rows a unit, or more stages in flight, are slower between kernels of different shapes. ValueError when the
    activations alone fill a block's memory.
    """
    for longest in (2048, 1024, 512):
        stage_k = min(longest, -(-k // 64) * 64)
        size = GemvTuning(8, stage_k, 1).stage_bytes
        for budget in (SMEM_SHARED, SMEM_PORTABLE):
            stages = min((budget - STATIC - rows * (2 * k + 64)) // size, 8)
            if stages >= 2:
                return GemvTuning(8, stage_k, stages, min_blocks=3 if budget == SMEM_SHARED else 2)
    raise ValueError(f"{rows} rows of {k} columns leave no room for weights in {SMEM_PORTABLE} bytes")
