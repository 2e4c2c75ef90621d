"""Paged attention of a decode step: microseconds a launch, bytes of keys and values, share of the card's read bandwidth.

Three views. `chain`: one captured graph of launches back to back, each on a layer of its own so that L2 holds none of them; with programmatic
edges they overlap at their ends, as they do with their neighbours in a step, with plain ones they do not. `in a step`: what the attention
launches of a whole step with one row add to its products. The ceiling is a plain read in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from graphrt.kernels.array import Array
from graphrt.kernels.cuda import attention_decode
from graphrt.kernels.cuda.attention_decode import DecodeTuning, attention_decode_call, choose
from graphrt.kernels.cuda.driver import KernelCall
from graphrt.kernels.cuda.fill import fill_bell
from graphrt.kernels.ops import Rope
from graphrt.perf.device_time import graph_us, read_ceiling
from graphrt.perf.kernel_gemv import SHAPES, Chain, chosen

BF16 = np.dtype(ml_dtypes.bfloat16)
BLOCK_TOKENS = 32
LAUNCHES = 48  # of a graph, at least
SPREAD = 256 << 20  # bytes of keys and values that a graph goes through at least: several times L2


@dataclass(frozen=True, slots=True)
class Load:
    """lengths: tokens of each row."""

    name: str
    lengths: tuple[int, ...]


def loads(seed: int) -> list[Load]:
    """One row from short to long, and batches."""
    mixed = np.random.default_rng(seed).integers(256, 8192, 64)
    return [
        *(Load(f"1 x {n}", (n,)) for n in (512, 2048, 8192, 32768, 131072)),
        Load("8 x 2048", (2048,) * 8),
        Load("32 x 512", (512,) * 32),
        Load("64 mixed, 4k", tuple(int(n) for n in mixed)),
    ]


class Bench:
    """A cache with `load`'s sequences in scattered blocks."""

    def __init__(self, driver: Any, heads: int, kv_heads: int, head_dim: int, load: Load) -> None:
        self.driver, self.load = driver, load
        rows = len(load.lengths)
        self.nbytes = sum(load.lengths) * 2 * kv_heads * head_dim * 2
        self.layers = -(-SPREAD // self.nbytes)
        self.launches = max(self.layers, LAUNCHES)
        need = [-(-n // BLOCK_TOKENS) for n in load.lengths]
        table = np.zeros((rows, max(need)), np.int32)
        order = np.random.default_rng(1).permutation(sum(need)).astype(np.int32)
        for r, blocks in enumerate(np.split(order, np.cumsum(need)[:-1])):
            table[r, : len(blocks)] = blocks
        self.cache = driver.alloc((sum(need), self.layers, 2, kv_heads, BLOCK_TOKENS, head_dim), BF16)
        self.q, self.out = (driver.alloc((rows, heads, head_dim), BF16) for _ in range(2))
        fills = [fill_bell(driver, a, 1, 1.0) for a in (self.cache, self.q)]
        driver.prepare({f.spec for f in fills})
        for fill in fills:
            driver.launch(fill)
        self.step: Any = SimpleNamespace(
            block_table=self._put(table),
            row_slot=self._put(np.arange(rows, dtype=np.int32)),
            positions=self._put(np.array(load.lengths, np.int32) - 1),
        )
        words = attention_decode.MAX_PAIRS + 2 * rows * heads * (head_dim + 2) * 64
        self.workspace = driver.alloc((words,), np.uint32)

    def _put(self, values: NDArray[Any]) -> Array:
        array = self.driver.alloc(values.shape, values.dtype)
        self.driver.upload(array, values)
        return array

    def calls(self, tuning: DecodeTuning, pdl: bool) -> list[KernelCall]:
        scale = self.q.shape[2] ** -0.5
        return [
            replace(
                attention_decode_call(
                    self.driver, self.q, self.step, self.cache, i % self.layers, scale, self.out, self.workspace, tuning
                ),
                pdl=pdl,
            )
            for i in range(self.launches)
        ]

    def us(self, tuning: DecodeTuning, pdl: bool) -> float:
        """Microseconds a launch, median."""
        driver, calls = self.driver, self.calls(tuning, pdl)
        driver.prepare({calls[0].spec})
        graph = driver.capture(lambda: [driver.launch(c) for c in calls])
        replays = max(min(int(2e10 / self.nbytes / self.launches), 20), 1)
        return statistics.median(graph_us(driver, graph, replays=replays, rounds=5)) / self.launches


def variants(
    base: DecodeTuning, rows: int, group: int, e: int, sms: int, sweep: bool
) -> Iterator[tuple[str, DecodeTuning]]:
    """The chosen tuning, and with `sweep` its neighbours."""
    yield "chosen", base
    if not sweep:
        return
    for cluster in (1, 2, 4, 8):
        workers = sms // cluster
        splits = base.max_splits if cluster == base.cluster else 32
        yield f"cluster {cluster}", replace(base, cluster=cluster, workers=workers, max_splits=splits)
    for early in (0, 2, 4, 16, 32):
        yield f"early {early}", replace(base, early=early)
    for warps in (4, 8):
        for slots in (2, 3, 4, 6, 8):
            tuning = replace(base, warps=warps, slots=slots, min_tiles=max(base.min_tiles * base.warps // warps, 1))
            if tuning != base and tuning.smem(rows, group, e) <= 99 * 1024:
                yield f"warps {warps} slots {slots}", tuning
    for tiles in (1, 2, 4, 16):
        yield f"min_tiles {tiles}", replace(base, min_tiles=tiles)
    if base.cluster == 1:
        for per_sm in (2, 3):
            small = replace(base, workers=base.workers * per_sm, slots=max(base.slots // per_sm, 2))
            yield f"{per_sm} blocks a multiprocessor", small


def in_a_step(driver: Any, name: str, length: int) -> dict[str, Any]:
    """What attention adds to the products of a step with one row."""
    s = SHAPES[name]
    chain = Chain(driver, s, 1)
    blocks = -(-length // BLOCK_TOKENS)
    chain.cache = driver.alloc((blocks, s.layers, 2, s.kv_heads, BLOCK_TOKENS, s.head_dim), BF16)
    table, positions = driver.alloc((1, blocks), np.int32), driver.alloc((1,), np.int32)
    driver.upload(table, np.random.default_rng(1).permutation(blocks).astype(np.int32)[None])
    driver.upload(positions, np.array([length - 1], np.int32))
    chain.step = SimpleNamespace(block_table=table, row_slot=driver.alloc((1,), np.int32), positions=positions)
    half = (length, s.head_dim // 2)
    chain.rope = Rope(driver.alloc(half, np.float32), driver.alloc(half, np.float32))
    attended = driver.alloc(chain.q.shape, BF16)
    words = attention_decode.attention_decode_workspace(1, s.heads, s.kv_heads, s.head_dim, driver.sm_count)
    workspace = driver.alloc((words,), np.uint32)
    products = chain.calls(chosen(s, 1))
    whole: list[Any] = []
    for i, call in enumerate(products):
        whole.append(call)
        if i % 4 == 0 and i < 4 * s.layers:
            whole.append(
                attention_decode_call(
                    driver, chain.q, chain.step, chain.cache, i // 4, s.head_dim**-0.5, attended, workspace
                )
            )
    driver.prepare({c.spec for c in whole})
    times = []
    for calls in (products, whole):
        graph = driver.capture(lambda calls=calls: [driver.launch(c) for c in calls])
        times.append(statistics.median(graph_us(driver, graph, replays=20, rounds=9)))
    nbytes = length * 2 * s.kv_heads * s.head_dim * 2
    each = (times[1] - times[0]) / s.layers
    return {"shape": name, "length": length, "products_us": times[0], "step_us": times[1], "us": each, "bytes": nbytes}


def main() -> None:
    """Print the tables, the last one last; write JSON with --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("llama-1b", "llama-8b"), action="append")
    parser.add_argument("--load", help="only loads whose name begins so")
    parser.add_argument("--sweep", action="store_true", help="neighbours of the chosen tuning")
    parser.add_argument("--no-step", action="store_true", help="without the whole step")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from graphrt.kernels.cuda.cuda_driver import CudaDriver

    driver = CudaDriver()
    shapes = options.shape or ["llama-1b", "llama-8b"]
    steps = [] if options.no_step else [in_a_step(driver, s, n) for s in shapes for n in (512, 8192)]
    ceiling = read_ceiling(driver)
    rows: list[dict[str, Any]] = []
    for name in shapes:
        s = SHAPES[name]
        group = s.heads // s.kv_heads
        for load in loads(seed=7):
            if options.load and not load.name.startswith(options.load):
                continue
            bench = Bench(driver, s.heads, s.kv_heads, s.head_dim, load)
            count = len(load.lengths)
            base = choose(count, s.kv_heads, group, s.head_dim, driver.sm_count)
            for variant, tuning in variants(base, count, group, s.head_dim, driver.sm_count, options.sweep):
                row = {"shape": name, "load": load.name, "variant": variant, "bytes": bench.nbytes}
                try:
                    row |= {"us": bench.us(tuning, True), "plain_us": bench.us(tuning, False)}
                except Exception as error:
                    print(name, load.name, variant, "failed:", str(error)[:200])
                    continue
                rows.append(row)
            del bench
    print(
        f"{driver.name}, {driver.sm_count} multiprocessors, reads {ceiling:.0f} GB/s; blocks of {BLOCK_TOKENS} tokens, bf16"
    )
    print(f"\n{'in a step':24} {'tokens':>7} {'us a layer':>10} {'products':>9} {'step':>9}")
    for r in steps:
        print(f"{r['shape']:24} {r['length']:7} {r['us']:10.2f} {r['products_us']:9.1f} {r['step_us']:9.1f}")
    print(
        f"\n{'shape':9} {'rows x tokens':14} {'tuning':26} {'us':>8} {'plain us':>8} {'MB':>8} {'GB/s':>6} {'of read':>7}"
    )
    for r in rows:
        rate = r["bytes"] / r["us"] / 1e3
        print(
            f"{r['shape']:9} {r['load']:14} {r['variant']:26} {r['us']:8.2f} {r['plain_us']:8.2f} {r['bytes'] / 1e6:8.1f} "
            f"{rate:6.0f} {rate / ceiling:7.1%}"
        )
    if options.out:
        options.out.write_text(json.dumps({"ceiling_gbps": ceiling, "steps": steps, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
