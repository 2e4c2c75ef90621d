"""The weight-streaming chain of a decode step, without attention: microseconds, share of the card's read bandwidth, by tuning.

One captured graph holds all layers' products with weights of their own (so that L2 holds none of them), launched back to back with
events around a run of replays. The ceiling is a plain read of 6 GB in the same process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda import gemv
from graphrt.kernels.cuda.gemv_tuning import GemvTuning, choose
from graphrt.kernels.ops import AttentionWeights, HeadShape, Linear, MlpWeights, Rope
from graphrt.perf.device_time import graph_us, read_ceiling

BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int


SHAPES = {
    "llama-1b": Shape(2048, 8192, 32, 8, 64, 16, 128256),
    "llama-8b": Shape(4096, 14336, 32, 8, 128, 32, 128256),
    "smollm2-135m": Shape(576, 1536, 9, 3, 64, 30, 49152),
}


class Chain:
    """All products of a step, with weights made on the device."""

    def __init__(self, driver: Any, s: Shape, rows: int) -> None:
        self.driver, self.s, self.rows = driver, s, rows

        def linear(n: int, k: int) -> Linear:
            return Linear(n, k, driver.alloc((n, k), BF16), None)

        f32 = np.float32
        self.x, self.norm = driver.alloc((rows, s.hidden), f32), driver.alloc((s.hidden,), f32)
        self.q = driver.alloc((rows, s.heads, s.head_dim), BF16)
        self.hidden, self.logits = driver.alloc((rows, s.ffn), BF16), driver.alloc((rows, s.vocab), f32)
        self.picked = driver.alloc((rows,), np.int32)
        self.qkv = [linear((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden) for _ in range(s.layers)]
        self.o = [linear(s.hidden, s.heads * s.head_dim) for _ in range(s.layers)]
        self.gate_up = [linear(2 * s.ffn, s.hidden) for _ in range(s.layers)]
        self.down = [linear(s.hidden, s.ffn) for _ in range(s.layers)]
        self.head = linear(s.vocab, s.hidden)
        self.rope = Rope(driver.alloc((64, s.head_dim // 2), f32), driver.alloc((64, s.head_dim // 2), f32))
        self.cache = driver.alloc((rows, s.layers, 2, s.kv_heads, 32, s.head_dim), BF16)
        ints = driver.alloc((max(rows, 8),), np.int32)
        self.step: Any = _Step(ints[:rows], ints[:rows], driver.alloc((rows, 2), np.int32))
        self.counters = driver.alloc((1024,), np.uint32)
        self.nbytes = sum(w.data.nbytes for w in (*self.qkv, *self.o, *self.gate_up, *self.down, self.head))

    def calls(self, tune: dict[str, GemvTuning], pdl: bool = True) -> list[Any]:
        """The step's launches in order."""
        d, s, eps = self.driver, self.s, 1e-5
        calls = []
        counters = iter(self.counters[32 * i : 32 * i + 1] for i in itertools.cycle(range(32)))
        for i in range(s.layers):
            attention = AttentionWeights(self.norm, self.qkv[i], None, None)
            shape = HeadShape(s.heads, s.kv_heads, s.head_dim, i)
            calls += [
                gemv.gemv_norm_qkv_rope_append(
                    d,
                    next(counters),
                    self.x,
                    attention,
                    eps,
                    self.rope,
                    shape,
                    self.step,
                    self.cache,
                    self.q,
                    tune["qkv"],
                ),
                gemv.gemv_residual(d, next(counters), self.q, self.o[i], self.x, tune["o"]),
                gemv.gemv_norm_gate_up_silu(
                    d, next(counters), self.x, MlpWeights(self.norm, self.gate_up[i]), eps, self.hidden, tune["gate_up"]
                ),
                gemv.gemv_residual(d, next(counters), self.hidden, self.down[i], self.x, tune["down"]),
            ]
        calls.append(
            gemv.gemv_norm_head(
                d, next(counters), self.x, self.picked, self.norm, eps, self.head, self.logits, tune["head"]
            )
        )
        return calls


@dataclass(frozen=True, slots=True)
class _Step:
    positions: Array
    row_slot: Array
    block_table: Array


def chosen(s: Shape, rows: int) -> dict[str, GemvTuning]:
    """The default tuning of each product."""
    return {
        "qkv": choose(rows, (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
        "o": choose(rows, s.hidden, s.heads * s.head_dim),
        "gate_up": choose(rows, 2 * s.ffn, s.hidden),
        "down": choose(rows, s.hidden, s.ffn),
        "head": choose(rows, s.vocab, s.hidden),
    }


def uniform(
    s: Shape, rows: int, unit: int, stage_k: int, budget: int, warps: int, per_sm: int, least: int, window: int
) -> dict[str, GemvTuning]:
    """The same cut everywhere, as many stages as the budget holds."""
    tunes = {}
    for name, k in (
        ("qkv", s.hidden), ("o", s.heads * s.head_dim), ("gate_up", s.hidden), ("down", s.ffn), ("head", s.hidden),
    ):  # fmt: skip
        cut = min(stage_k, -(-k // 64) * 64)
        size = GemvTuning(unit, cut, 1).stage_bytes
        stages = max(min((budget - rows * (2 * k + 64)) // size, 16), 2)
        tunes[name] = GemvTuning(unit, cut, stages, warps, per_sm, least, window=min(window, stages))
    return tunes


def measure(chain: Chain, tune: dict[str, GemvTuning]) -> tuple[float, int, int]:
    """(median microseconds of a replay, nodes, programmatic edges)."""
    driver = chain.driver
    calls = chain.calls(tune)
    driver.prepare({c.spec for c in calls})
    graph = driver.capture(lambda: [driver.launch(c) for c in calls])
    return statistics.median(graph_us(driver, graph, replays=20, rounds=7)), graph.nodes, graph.programmatic_edges


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from graphrt.kernels.cuda.cuda_driver import CudaDriver

    driver = CudaDriver()
    shape = SHAPES[options.shape]
    ceiling = read_ceiling(driver)
    chain = Chain(driver, shape, options.rows)
    variants = {"chosen": chosen(shape, options.rows)}
    if options.sweep:
        for unit, stage_k, warps, window in itertools.product((8, 16), (512, 1024, 2048), (4, 8), (2, 4)):
            budget, least, per_sm = 74, 3, 1
            try:
                tune = uniform(shape, options.rows, unit, stage_k, budget * 1024 - 1536, warps, per_sm, least, window)
                if max(t.smem(options.rows, shape.ffn) for t in tune.values()) < 220 * 1024:
                    variants[f"u{unit} k{stage_k} w{warps} f{window}"] = tune
            except ValueError:
                continue
    rows = []
    for name, tune in variants.items():
        try:
            us, nodes, edges = measure(chain, tune)
        except Exception as error:
            print(name, "failed:", str(error)[:200])
            continue
        rows.append({"variant": name, "us": us, "gbps": chain.nbytes / us / 1e3, "nodes": nodes, "pdl_edges": edges})
    rows.sort(key=lambda r: r["us"])
    print(f"{options.shape} rows {options.rows}: {chain.nbytes / 1e9:.3f} GB, ceiling {ceiling:.0f} GB/s")
    for r in rows[:16] + [r for r in rows[16:] if r["variant"] == "chosen"]:
        print(
            f"{r['variant']:24} {r['us']:8.1f} us {r['gbps']:7.0f} GB/s {r['gbps'] / ceiling:6.1%} {r['nodes']} nodes"
        )
    if options.out:
        options.out.write_text(json.dumps({"ceiling_gbps": ceiling, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
