"""How `gemm64.cu` cuts its work: one record that is template argument, cache key and tuning result at once."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 32  # columns
MIN_CLUSTER, MAX_CLUSTER = 2, 8  # blocks send each other their sums in a way that only clusters have; 8 is portable
MAX_STAGES = 16
KB = 1024


@dataclass(frozen=True, slots=True)
class Gemm64Tuning:
    """cluster: blocks that share the columns. unit: rows of w that a warp takes at a time, 16 or 32. warps: that multiply.

    bulk: stages come by bulk copies, to a ring that all warps share, else by each warp's own copies of 16 bytes a lane, to its own. stage_k:
    columns of a stage; stages: of a ring; act_slots: stages of activations, all or at least two. prefetch: stages asked into L2 beyond.
    min_blocks: that the compiler must leave registers for. evict_first: whether weights leave L2 first; bulk copies always do.
    """

    cluster: int
    unit: int
    warps: int
    stage_k: int
    stages: int
    act_slots: int
    prefetch: int = 0
    min_blocks: int = 2
    bulk: bool = True
    evict_first: bool = False

    def __post_init__(self) -> None:
        """ValueError for a single block: it may not send itself its sums as the blocks of a cluster do."""
        if not MIN_CLUSTER <= self.cluster <= MAX_CLUSTER:
            raise ValueError(f"a cluster of {self.cluster} blocks: must be {MIN_CLUSTER} to {MAX_CLUSTER}")

    @property
    def threads(self) -> int:
        """Of a block; one warp copies in bulk."""
        return 32 * (self.warps + self.bulk)

    @property
    def stage_bytes(self) -> int:
        return self.unit * 2 * self.stage_k + 64

    @property
    def ring_bytes(self) -> int:
        """All stages of a block."""
        return self.stages * self.stage_bytes * (1 if self.bulk else self.warps)

    def smem(self, rows: int) -> int:
        """Bytes of dynamic shared memory, as gemm64.cu lays it out. rows: padded to a multiple of 8."""
        columns = rows // self.cluster
        acts, sums = self.act_slots * (rows * 2 * self.stage_k + 64), self.warps * self.unit * rows * 4
        barriers = 20 * MAX_STAGES + 16 * self.act_slots if self.bulk else 0
        shared = barriers + 16 * (self.warps + columns + 2) + 4 * (rows + self.warps * columns)
        return self.ring_bytes + acts + sums + shared


def parts_of(k: int, cluster: int, stage_k: int) -> int:
    """Stages of a unit."""
    return -(-(-(-k // CHUNK // cluster) * CHUNK) // stage_k)


def clusters_of(sm_count: int, cluster: int, units: int) -> int:
    """Clusters of the grid: as many as the card takes at once, fewer when that gives none of them more to do.

    Multiprocessors come in groups of 16 to 18, and a cluster does not leave its group.
    """
    usable = sm_count - sm_count % 16 if cluster >= 4 and sm_count >= 16 else sm_count
    most = max(usable // cluster, 1)
    each = -(-units // most)
    return -(-units // each)
