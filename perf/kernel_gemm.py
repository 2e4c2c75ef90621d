"""The weight-streaming chain of a decode step with 3 to 64 rows, without attention: microseconds, share of the card's bandwidth, by tuning.

One captured graph holds all layers' products with weights of their own (so that L2 holds none of them). It is compared with the chain for
one row and with a plain read of 6 GB, both in the same process. `--sweep` goes from product to product and keeps what makes the whole
chain faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from graphrt.kernels.cuda import gemm64
from graphrt.kernels.cuda.gemm64_choice import choose
from graphrt.kernels.cuda.gemm64_tuning import CHUNK, KB, MAX_STAGES, Gemm64Tuning, parts_of
from graphrt.kernels.ops import Linear
from graphrt.perf import kernel_gemv
from graphrt.perf.device_time import read_ceiling
from graphrt.perf.kernel_gemm_chain import BF16, PRODUCTS, Chain, Tunes, Weights
from graphrt.perf.kernel_gemv import SHAPES

# -- the sweep ---------------------------------------------------------------------------------------------------------


ROOMS = (74 * KB, 92 * KB, 112 * KB, 150 * KB, 190 * KB, 226 * KB)  # bytes of a block
COLUMNS = {True: (256, 512, 1024), False: (64, 128, 256)}  # of a stage, by whether copies are in bulk


def fill_up(chain: Chain, t: Gemm64Tuning, budget: int) -> Gemm64Tuning | None:
    """The same cut with as many stages as the budget holds."""
    room = min(budget, chain.driver.smem_per_block) - replace(t, stages=0).smem(gemm64.padded_rows(chain.rows))
    stages = min(room // replace(t, stages=1).ring_bytes, MAX_STAGES)
    return replace(t, stages=stages) if stages >= 2 else None


def shapes(chain: Chain, product: str, t: Gemm64Tuning) -> Iterator[Gemm64Tuning | None]:
    """Other clusters, units, warps and stages in as much memory, or as much as two blocks may have."""
    k, rows = chain.w.of(product)[0].data.shape[1], gemm64.padded_rows(chain.rows)
    resident = t.act_slots == parts_of(k, t.cluster, t.stage_k)
    for cluster in sorted({max(t.cluster // 2, 2), t.cluster, min(2 * t.cluster, 8)}):
        slice_k = -(-k // CHUNK // cluster) * CHUNK
        for unit, warps in ((16, 4), (16, 6), (16, 8), (16, 12), (32, 4), (32, 8)):
            for stage_k in sorted({min(v, slice_k) for v in COLUMNS[t.bulk]}):
                parts = parts_of(k, cluster, stage_k)
                slots = parts if resident else min(3, parts)
                cut = replace(t, cluster=cluster, unit=unit, warps=warps, stage_k=stage_k, act_slots=slots)
                yield fill_up(chain, cut, max(t.smem(rows), 112 * KB))


def depths(chain: Chain, product: str, t: Gemm64Tuning) -> Iterator[Gemm64Tuning | None]:
    """The same cut with more or less memory, activations that stay or do not, stages asked ahead, registers for fewer blocks."""
    parts = parts_of(chain.w.of(product)[0].data.shape[1], t.cluster, t.stage_k)
    slots = {t.act_slots, parts} | ({3, 4} if product in ("o", "down") and parts > 4 else set())
    for budget in ROOMS:
        for prefetch in (0, 2, 6):
            for act_slots in sorted(slots):
                yield fill_up(chain, replace(t, prefetch=prefetch, act_slots=act_slots), budget)
    if not t.bulk:
        yield replace(t, evict_first=not t.evict_first)
    yield replace(t, min_blocks=1 if t.min_blocks > 1 else 2)


def sweep(chain: Chain, tunes: Tunes) -> Tunes:
    """From product to product: shapes, then depths; what makes the whole chain faster by a thousandth stays."""
    best = chain.microseconds(chain.calls(tunes))
    for product in PRODUCTS:
        for step in (shapes, depths):
            tried = [t for t in dict.fromkeys(step(chain, product, tunes[product])) if t is not None]
            chain.driver.prepare({c.spec for t in tried for c in chain.call(product, 0, t)})
            for t in tried:
                us = chain.microseconds(chain.calls({**tunes, product: t}), 10, 5)
                if us < 0.999 * best:
                    best, tunes = us, {**tunes, product: t}
        print(f"  {product}: {best:.1f} us with {tunes[product]}", flush=True)
    return tunes


# -- the report --------------------------------------------------------------------------------------------------------


def report(chain: Chain, name: str, tunes: Tunes, ceiling: float, one_row: float) -> dict[str, Any]:
    """Print a line for the chain and one for each product; the same as a record."""
    total = sum(chain.w.nbytes(p) for p in PRODUCTS)
    us = chain.microseconds(chain.calls(tunes))
    print(
        f"rows {chain.rows:2} {name:8} {us:8.1f} us {total / us / 1e3:6.0f} GB/s {total / us / 1e3 / ceiling:6.1%} of ceiling, "
        f"{us / one_row:.3f} x one row",
        flush=True,
    )
    parts = {}
    for product in PRODUCTS:
        alone = chain.microseconds(chain.only(product, tunes))
        smem, nbytes = tunes[product].smem(gemm64.padded_rows(chain.rows)), chain.w.nbytes(product)
        parts[product] = {"us": alone, "gbps": nbytes / alone / 1e3, "smem": smem, "tuning": repr(tunes[product])}
        print(
            f"   {product:8} alone {alone:8.1f} us {nbytes / alone / 1e3:6.0f} GB/s {smem // KB:4} KB {tunes[product]}"
        )
    return {"rows": chain.rows, "name": name, "us": us, "ratio": us / one_row, "products": parts}


def clusters_that_fit(driver: Any, cluster: int) -> int:
    """Clusters at a time when no two blocks share a multiprocessor, says the driver."""
    from cuda.bindings import driver as cu

    from graphrt.kernels.cuda.cuda_call import check

    w = Linear(4096, 512 * cluster, driver.alloc((4096, 512 * cluster), BF16), None)
    act, out = driver.alloc((8, w.k), BF16), driver.alloc((8, w.n), np.float32)
    tuning = replace(choose(False, 8, w.n, w.k, driver.smem_per_block), cluster=cluster)
    (call,) = gemm64.gemm64_linear(driver, act, w, out, tuning)
    driver.prepare([call.spec])
    handle, smem = driver.jit.kernel(call.spec).handle, 120 * KB
    limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(cu.cuKernelSetAttribute, limit, smem, handle, cu.CUdevice(driver.device_id))
    config, attribute = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
    config.gridDimX, config.gridDimY, config.gridDimZ = cluster * 64, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = call.block
    config.sharedMemBytes, config.attrs, config.numAttrs = smem, [attribute], 1
    return int(check(cu.cuOccupancyMaxActiveClusters, cu.CUfunction(int(handle)), config))


def main() -> None:
    """Print tables; with --out write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--copies", choices=("bulk", "async"), help="the kind of copies; default: the usual")
    parser.add_argument("--sweep", action="store_true", help="look for better cuts; minutes for each number of rows")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from graphrt.kernels.cuda.cuda_driver import CudaDriver

    driver, shape = CudaDriver(), SHAPES[options.shape]
    ceiling = read_ceiling(driver)
    one_row, _, _ = kernel_gemv.measure(kernel_gemv.Chain(driver, shape, 1), kernel_gemv.chosen(shape, 1))
    weights = Weights(driver, shape)
    total = sum(weights.nbytes(p) for p in PRODUCTS)
    print(f"{options.shape}: {total / 1e9:.3f} GB, ceiling {ceiling:.0f} GB/s, one row {one_row:.1f} us", flush=True)
    for size in (2, 4, 8):
        try:
            print(
                f"clusters of {size}: {clusters_that_fit(driver, size)} at a time on {driver.sm_count} multiprocessors"
            )
        except Exception as error:  # a number to know, not one that anything needs
            print(f"clusters of {size}: unknown, {error}")
    records = []
    for rows in options.rows:
        chain = Chain(weights, rows)
        tunes = {p: chain.default(p, None if options.copies is None else options.copies == "bulk") for p in PRODUCTS}
        records.append(report(chain, "chosen", tunes, ceiling, one_row))
        if options.sweep:
            records.append(report(chain, "swept", sweep(chain, tunes), ceiling, one_row))
    if options.out:
        record = {"shape": options.shape, "ceiling_gbps": ceiling, "one_row_us": one_row, "chains": records}
        options.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
