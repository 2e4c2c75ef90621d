"""Which cut of `gemm64.cu` a shape gets. The number of blocks that share the columns is a function of weight and card alone, so that a row's
bits are the same with any number of rows."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.kernels.cuda.gemm64_tuning import CHUNK, KB, MAX_CLUSTER, MAX_STAGES, MIN_CLUSTER, Gemm64Tuning, parts_of

BULK = True  # the kind that has passed its tests on a GPU; the other has passed them in an emulation only
BLOCKS = 128  # of a grid, where there is work for them: clusters of 8 on a card of 132 multiprocessors fill no more


def choose(
    normed: bool, rows: int, n: int, k: int, limit: int, max_unit: int = 32, bulk: bool | None = None
) -> Gemm64Tuning:
    """rows: padded to a multiple of 8. limit: bytes of shared memory that a block may take. max_unit: what an epilogue allows.

    Up to 32 rows, units of 16; beyond that every load of an activation should serve 32 rows of w, or shared memory is too slow.
    bulk: the kind of copies, None for the usual. ValueError when nothing fits.
    """
    bulk = BULK if bulk is None else bulk
    cluster = cluster_of(n, k, limit, bulk)
    cut = (_bulk if bulk else _async)(normed, rows, n, k, limit, max_unit, cluster)
    if cut is None:
        raise ValueError(f"{rows} rows of {k} columns leave no room for weights in {limit} bytes of shared memory")
    return cut


def cluster_of(n: int, k: int, limit: int, bulk: bool | None = None) -> int:
    """Blocks that share the columns: few enough that rows of a stage are long where copies are in bulk, many enough that all blocks work."""
    large = (BULK if bulk is None else bulk) and limit > 200 * KB  # a small card could not hold 64 rows of so many
    columns, chunks = 1024 if large else 512, k // CHUNK
    cluster = MIN_CLUSTER
    while cluster < MAX_CLUSTER and (
        k > columns * cluster
        or (n // 16 * cluster < BLOCKS and k >= columns // 2 * cluster and chunks % (2 * cluster) == 0)
    ):
        cluster *= 2
    return cluster


def _shapes(rows: int, max_unit: int) -> list[tuple[int, int]]:
    """Units and warps, the best first."""
    shapes = [(16, 8), (16, 4)] if rows <= 32 else [(32, 4), (16, 4)]
    return [(unit, warps) for unit, warps in shapes if unit <= max_unit]


# -- bulk copies: 2 KB a row where there is room for it ----------------------------------------------------------------

BULK_COLUMNS = (1024, 512, 256)  # of a stage, at most
# Bytes of a block (three share a multiprocessor, two on any card, two on a large one, one), and of the ring at least.
BULK_ROOMS = (
    (74 * KB, 40 * KB),
    (98 * KB, 40 * KB),
    (112 * KB, 40 * KB),
    (226 * KB, 32 * KB),
    (226 * KB, 12 * KB),
)
BULK_RING = 102 * KB  # bytes; more in flight brings nothing


def _bulk(normed: bool, rows: int, n: int, k: int, limit: int, max_unit: int, cluster: int) -> Gemm64Tuning | None:
    chunks = -(-k // CHUNK // cluster)
    each = -(-n // 16 // max(BLOCKS // cluster, 1))  # units of 16 rows that a cluster has
    for longest in BULK_COLUMNS:
        stage_k = -(-chunks // -(-chunks * CHUNK // longest)) * CHUNK
        parts = parts_of(k, cluster, stage_k)
        for budget, least in BULK_ROOMS:
            for unit, most in _shapes(rows, max_unit):
                warps = max(min(most, each * 16 // unit), 1)
                for act_slots in (parts,) if normed or parts <= 2 else (parts, 2):
                    t = Gemm64Tuning(cluster, unit, warps, stage_k, 1, act_slots)
                    room = min(budget, limit) - t.smem(rows) + t.ring_bytes
                    stages = min(room // t.stage_bytes, BULK_RING // t.stage_bytes, MAX_STAGES)
                    if stages >= 2 and stages * t.stage_bytes >= min(least, 2 * warps * t.stage_bytes):
                        return Gemm64Tuning(cluster, unit, warps, stage_k, stages, act_slots)
    return None


# -- each warp's own copies: short stages, two or more for each ---------------------------------------------------------

STAGE_CHUNKS = (4, 5, 6, 3)  # of a stage, the best first, where they divide a block's columns
BUDGETS = (
    112 * KB,
    166 * KB,
    226 * KB,
)  # bytes of a block: two side by side on a large multiprocessor, one, and what can be had
RINGS = (66 * KB, 50 * KB)  # bytes of all stages: as much as is worth having, and what keeps memory busy


def _async(normed: bool, rows: int, n: int, k: int, limit: int, max_unit: int, cluster: int) -> Gemm64Tuning | None:
    for budget in BUDGETS:
        for t in _async_cuts(normed, rows, n, k, max_unit, cluster, least=budget == BUDGETS[-1]):
            if t.smem(rows) <= min(budget, limit):
                return t
    return None


def _async_cuts(
    normed: bool, rows: int, n: int, k: int, max_unit: int, cluster: int, least: bool
) -> Iterator[Gemm64Tuning]:
    """The best first. least: down to two stages for two warps."""
    stage_k = stage_of(k, cluster)
    parts = parts_of(k, cluster, stage_k)
    slots = (parts,) if normed or parts <= 3 else (parts, 3)
    for unit, most in [*_shapes(rows, max_unit), *([(16, 2)] if least else [])]:
        each = max(-(-n // unit // max(BLOCKS // cluster, 1)), 1)  # units of a cluster
        warps = warps_of(each, most)
        size = Gemm64Tuning(cluster, unit, warps, stage_k, 1, parts, bulk=False).ring_bytes
        enough = max(-(-each // warps) * parts, 2)  # stages hold all that there is
        for ring in RINGS:
            stages = min(max(ring // size, 2), MAX_STAGES, enough)
            if stages * size >= 0.9 * RINGS[-1] or stages == enough:
                for act_slots in slots:
                    yield Gemm64Tuning(cluster, unit, warps, stage_k, stages, act_slots, bulk=False)
        if least:
            yield Gemm64Tuning(cluster, unit, warps, stage_k, 2, slots[-1], bulk=False)


def stage_of(k: int, cluster: int) -> int:
    """Columns of a stage: stages that are all full, two of them or more to a unit."""
    chunks = -(-k // CHUNK // cluster)
    return CHUNK * next((c for c in STAGE_CHUNKS if chunks % c == 0 and chunks > c), min(chunks, STAGE_CHUNKS[0]))


def warps_of(each: int, most: int) -> int:
    """Warps for so many units: as many as may be, and few that have nothing to do while the last units run."""
    if each <= most:
        return each
    return min(range(most, most // 2, -1), key=lambda w: -each % w) if each <= 3 * most else most
