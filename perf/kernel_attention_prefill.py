"""Attention of a prompt's chunk: microseconds a launch and its share of what the library's matrix product reaches on the card.

Flops count what is visible: two products of 2 · head size each for every query head and every token that a row sees. The ceiling is the
library's bf16 product of 8192 x 8192 x 8192 random values in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.attention_prefill import MAX_PAIRS, PrefillTuning, attention_prefill_call, choose
from graphrt.kernels.cuda.fill import fill_bell
from graphrt.perf.device_time import events_us, graph_us
from graphrt.perf.kernel_gemv import SHAPES

BF16 = np.dtype(ml_dtypes.bfloat16)
BLOCK_TOKENS = 32
LAUNCHES = 4  # of a graph
PRODUCT = 8192
CHUNKS = [
    (64, 512),
    (64, 32768),
    (256, 8192),
    (512, 512),
    (512, 4096),
    (2048, 2048),
    (2048, 8192),
    (2048, 65536),
    (4096, 65536),
]


def filled(driver: Any, *shape: int) -> Array:
    """Random bf16."""
    array = driver.alloc(shape, BF16)
    call = fill_bell(driver, array, len(shape), 1.0)
    driver.prepare({call.spec})
    driver.launch(call)
    return array


def product_tflops(driver: Any) -> float:
    """What the library's product reaches, TFLOP/s."""
    x, w = filled(driver, PRODUCT, PRODUCT), filled(driver, PRODUCT, PRODUCT)
    out = driver.alloc((PRODUCT, PRODUCT), np.float32)
    us = statistics.median(events_us(driver, lambda: driver.matmul(x, w, out, False), 4, 7))
    return 2 * PRODUCT**3 / us / 1e6


class Bench:
    """The last `rows` tokens of a prompt of `length`."""

    def __init__(self, driver: Any, heads: int, kv_heads: int, head_dim: int, rows: int, length: int) -> None:
        self.driver = driver
        blocks = -(-length // BLOCK_TOKENS)
        self.cache = filled(driver, blocks, 1, 2, kv_heads, BLOCK_TOKENS, head_dim)
        self.q, self.out = filled(driver, rows, heads, head_dim), driver.alloc((rows, heads, head_dim), BF16)
        table, positions = driver.alloc((1, blocks), np.int32), driver.alloc((rows,), np.int32)
        driver.upload(table, np.random.default_rng(1).permutation(blocks).astype(np.int32)[None])
        driver.upload(positions, np.arange(length - rows, length, dtype=np.int32))
        self.step: Any = SimpleNamespace(
            kind="prefill", block_table=table, row_slot=driver.alloc((rows,), np.int32), positions=positions
        )
        seen = rows * (length - rows) + rows * (rows + 1) // 2
        self.flops = 4 * heads * head_dim * seen

    def us(self, tuning: PrefillTuning) -> float:
        """Microseconds a launch, median."""
        driver, (rows, heads, e) = self.driver, self.q.shape
        words = tuning.words(rows, self.cache.shape[3], heads // self.cache.shape[3], e)
        space = driver.alloc((MAX_PAIRS + words,), np.uint32)
        call = attention_prefill_call(driver, self.q, self.step, self.cache, 0, e**-0.5, self.out, space, tuning)
        call = replace(call, pdl=False)
        driver.prepare({call.spec})
        graph = driver.capture(lambda: [driver.launch(call) for _ in range(LAUNCHES)])
        replays = max(min(int(2e12 / self.flops), 20), 1)
        return statistics.median(graph_us(driver, graph, replays=replays, rounds=5)) / LAUNCHES


def main() -> None:
    """Print the table last; write JSON with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("llama-1b", "llama-8b"), action="append")
    parser.add_argument("--sweep", action="store_true", help="all tiles and shares")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from graphrt.kernels.cuda.cuda_driver import CudaDriver

    driver = CudaDriver()
    ceiling = product_tflops(driver)
    results: list[dict[str, Any]] = []
    for name in options.shape or ["llama-1b", "llama-8b"]:
        s = SHAPES[name]
        for rows, length in CHUNKS:
            bench = Bench(driver, s.heads, s.kv_heads, s.head_dim, rows, length)
            base = choose(rows, s.kv_heads, s.heads // s.kv_heads, driver.sm_count)
            tunings = {base}
            if options.sweep:
                tunings |= {PrefillTuning(m, shares) for m in (64, 128) for shares in (1, 2, 4, 8)}
            for t in sorted(tunings, key=lambda t: (t != base, t.tile_m, t.shares)):
                us = bench.us(t)
                results.append({"shape": name, "rows": rows, "length": length, "tile_m": t.tile_m, "shares": t.shares})
                results[-1] |= {"us": us, "tflops": bench.flops / us / 1e6, "chosen": t == base}
            del bench
    print(f"{driver.name}, {driver.sm_count} multiprocessors; the library's product reaches {ceiling:.0f} TFLOP/s")
    print(
        f"\n{'shape':9} {'rows':>5} {'tokens':>7} {'tile':>4} {'shares':>6} {'us':>10} {'TFLOP/s':>8} {'of product':>10}"
    )
    for r in results:
        share = r["tflops"] / ceiling
        mark = "" if r["chosen"] else "  (not chosen)"
        print(
            f"{r['shape']:9} {r['rows']:5} {r['length']:7} {r['tile_m']:4} {r['shares']:6} {r['us']:10.1f} {r['tflops']:8.1f} "
            f"{share:10.1%}{mark}"
        )
    if options.out:
        options.out.write_text(json.dumps({"product_tflops": ceiling, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
