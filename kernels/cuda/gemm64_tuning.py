"""How `gemm64.cu` cuts its work: one record that is template argument, cache key and tuning result at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CHUNK = 32  # columns
BLOCKS = 128  # of a grid, where there is work for them: clusters of 8 on a card of 132 multiprocessors fill no more
SLICE = 512  # columns of a block, where clusters of 8 reach: sums are sent once for so many products
MIN_CLUSTER, MAX_CLUSTER = 2, 8  # blocks send each other their sums in a way that only clusters have; 8 is portable
STAGE_CHUNKS = 8  # of a stage of the ring, when they divide a block's columns
MAX_STAGES = 16
KB = 1024
# Bytes a block (three grids share a multiprocessor, two on any card, two on a large one, one and a small one, one), and of the ring at least.
BUDGETS = ((74 * KB, 40 * KB), (98 * KB, 40 * KB), (112 * KB, 40 * KB), (150 * KB, 40 * KB), (226 * KB, 32 * KB), (226 * KB, 12 * KB))
RING = 64 * KB  # more in flight brings nothing


@dataclass(frozen=True, slots=True)
class Gemm64Tuning:
    """cluster: blocks that share the columns. unit: rows of w that a warp takes at a time, 16 or 32. warps: that multiply.

    stage_k: columns of a stage; stages: of the ring; act_slots: stages of activations, all or at least two. prefetch: stages asked into L2
    beyond the ring. min_blocks: that the compiler must leave registers for.
    """

    cluster: int
    unit: int
    warps: int
    stage_k: int
    stages: int
    act_slots: int
    prefetch: int = 0
    min_blocks: int = 2

    def __post_init__(self) -> None:
        """ValueError for a single block: it may not send itself its sums as the blocks of a cluster do."""
        if not 2 <= self.cluster <= MAX_CLUSTER:
            raise ValueError(f"a cluster of {self.cluster} blocks: must be 2 to {MAX_CLUSTER}")

    def smem(self, rows: int) -> int:
        """Bytes of dynamic shared memory, as gemm64.cu lays it out. rows: padded to a multiple of 8."""
        return self.stages * self.stage_bytes + self.other_bytes(rows)

    @property
    def stage_bytes(self) -> int:
        return self.unit * 2 * self.stage_k + 64

    def other_bytes(self, rows: int) -> int:
        """All but the ring's stages: activations, sums, and what the warps tell each other."""
        columns = rows // self.cluster
        shared = 20 * MAX_STAGES + 16 * (self.act_slots + self.warps + columns + 2) + 4 * (rows + self.warps * columns)
        return self.act_slots * (rows * 2 * self.stage_k + 64) + self.warps * self.unit * rows * 4 + shared


def cluster_of(n: int, k: int) -> int:
    """Blocks that share the columns: a function of the weight alone, so that a row's bits are the same with any number of rows."""
    cluster, chunks = MIN_CLUSTER, k // CHUNK
    while cluster < MAX_CLUSTER and (
        k > SLICE * cluster
        or (n // 16 * cluster < BLOCKS and k >= SLICE // 2 * cluster and chunks % (2 * cluster) == 0)
    ):
        cluster *= 2
    return cluster


def stage_of(k: int, cluster: int) -> int:
    """Columns of a stage: stages that are all full, two of them or more to a unit, where that leaves them long enough."""
    chunks = -(-k // CHUNK // cluster)
    full = [c for c in range(STAGE_CHUNKS // 2, STAGE_CHUNKS + 1) if chunks % c == 0 and chunks > c]
    return CHUNK * (max(full) if full else min(chunks, STAGE_CHUNKS + 4))


def clusters_of(sm_count: int, cluster: int, units: int) -> int:
    """Clusters of the grid: as many as the card takes at once, fewer when that gives none of them more to do.

    Multiprocessors come in groups of 16 to 18, and a cluster does not leave its group.
    """
    usable = sm_count - sm_count % 16 if cluster >= 4 and sm_count >= 16 else sm_count
    most = max(usable // cluster, 1)
    each = -(-units // most)
    return -(-units // each)


def choose(normed: bool, rows: int, n: int, k: int, limit: int, max_unit: int = 32) -> Gemm64Tuning:
    """rows: padded to a multiple of 8. limit: bytes of shared memory that a block may take. max_unit: what an epilogue allows.

    Up to 32 rows, units of 16 for 8 warps; beyond that every load of an activation must serve 32 rows of w, or shared memory is too slow.
    ValueError when nothing fits.
    """
    cluster = cluster_of(n, k)
    stage_k = stage_of(k, cluster)
    parts = -(-(-(-k // CHUNK // cluster) * CHUNK) // stage_k)
    for budget, ring in BUDGETS:
        for t in _cuts(normed, rows, n, cluster, stage_k, parts, max_unit):
            room = min(budget, limit) - t.other_bytes(rows)
            stages = min(room // t.stage_bytes, RING // t.stage_bytes, MAX_STAGES)
            if stages >= 2 and stages * t.stage_bytes >= min(ring, 2 * t.warps * t.stage_bytes):
                return Gemm64Tuning(cluster, t.unit, t.warps, stage_k, stages, t.act_slots)
    raise ValueError(f"{rows} rows of {k} columns leave no room for weights in {limit} bytes of shared memory")


def _cuts(
    normed: bool, rows: int, n: int, cluster: int, stage_k: int, parts: int, max_unit: int
) -> Iterator[Gemm64Tuning]:
    """What fits together, the best first; the ring is not measured yet."""
    units = -(-n // 16)
    each = -(-units // max(BLOCKS // cluster, 1))  # units of a cluster
    shapes = [(16, 8), (16, 4)] if rows <= 32 else [(32, 4), (16, 4)]
    for unit, warps in shapes:
        if unit > max_unit:
            continue
        warps = max(min(warps, each * 16 // unit), 1)
        yield Gemm64Tuning(cluster, unit, warps, stage_k, 1, parts)
        if not normed and parts > 2:
            yield Gemm64Tuning(cluster, unit, warps, stage_k, 1, 2)
