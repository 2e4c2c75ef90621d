"""Decode and prefill on the CPU beside `transformers` in float32, alternating in one process on one machine.

    python -m graphrt.perf.bench_cpu [--model DIR] [--rounds 5] [--out perf/results/cpu-smollm2.json]

Needs the `dev` extra (torch, transformers).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from graphrt.catalog import DEFAULT_MODEL
from graphrt.config import load_config
from graphrt.engine import Engine
from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.kernels.ops import Ops
from graphrt.models.registry import model_module
from graphrt.paths import find_model
from graphrt.perf.loopback import time_requests
from graphrt.perf.machine import machine_facts, read_bandwidth, spread
from graphrt.weights import open_checkpoint

PREFILL_TOKENS = 500
DECODE_PROMPT = 64
DECODE_STEPS = 32
BATCHES = (1, 8)


class Peer:
    """transformers, eager mode, float32, its own key/value cache."""

    def __init__(self, model_dir: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[float]]:
        """(seconds of the prompts' forward pass, seconds of each decode step), greedy."""
        torch = self.torch
        with torch.inference_mode():
            start = time.perf_counter()
            out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            first, times = time.perf_counter() - start, []
            for _ in range(steps):
                before = time.perf_counter()
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                times.append(time.perf_counter() - before)
        return first, times


def prompts(rng: np.random.Generator, count: int, length: int, vocab: int) -> list[list[int]]:
    """Fresh random token ids, so that no prefix is ever found in the cache."""
    return rng.integers(3, vocab, (count, length)).tolist()


def measure(engine: Engine, peer: Peer, rounds: int) -> dict[str, Any]:
    """All figures, each a median over rounds in which the two take turns."""
    rng = np.random.default_rng(0)
    vocab = engine.info.vocab_size
    prefill: dict[str, list[float]] = {"graphrt": [], "transformers": []}
    decode: dict[tuple[int, str], list[float]] = {(b, n): [] for b in BATCHES for n in prefill}
    for i in range(rounds + 1):
        keep = i > 0  # the first round warms both up
        one = prompts(rng, 1, PREFILL_TOKENS, vocab)
        times = {"graphrt": time_requests(engine, one, 1)[0], "transformers": peer.run(one, 0)[0]}
        for name, seconds in times.items():
            prefill[name] += [seconds] * keep
        for batch in BATCHES:
            some = prompts(rng, batch, DECODE_PROMPT, vocab)
            steps = {
                "graphrt": time_requests(engine, some, DECODE_STEPS + 1)[1],
                "transformers": peer.run(some, DECODE_STEPS)[1],
            }
            for name, series in steps.items():
                decode[batch, name] += [statistics.median(series)] * keep
    return {
        "prefill": compare("prefill", {"tokens": PREFILL_TOKENS}, prefill),
        "decode": [
            compare("decode", {"batch": b, "context": DECODE_PROMPT}, {n: decode[b, n] for n in prefill})
            for b in BATCHES
        ],
    }


def compare(what: str, shape: dict[str, int], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of both and how many times faster graphrt is."""
    ratio = statistics.median(seconds["transformers"]) / statistics.median(seconds["graphrt"])
    ms = {name: {k: round(v * 1e3, 3) for k, v in spread(s).items()} for name, s in seconds.items()}
    return {"what": what, **shape, "ms": ms, "speed_vs_transformers": round(ratio, 3)}


def main(argv: list[str]) -> int:
    """Run and write the result."""
    parser = argparse.ArgumentParser(prog="python -m graphrt.perf.bench_cpu", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    model_dir, threads = find_model(args.model), len(os.sched_getaffinity(0))
    engine = build_engine(EngineConfig(str(model_dir), max_batch=max(BATCHES), context=1024))
    result = measure(engine, Peer(model_dir, threads), args.rounds)
    step_bytes = weight_bytes(engine.graphs.ops, model_dir)
    bandwidth = read_bandwidth(threads, step_bytes)
    one = result["decode"][0]["ms"]["graphrt"]["median"]
    result |= {
        "model": model_dir.name,
        "engine": engine.info.device,
        "weight_bytes_per_step": step_bytes,
        "read_bandwidth_gbps": round(bandwidth, 2),
        "decode_gbps": round(step_bytes / one / 1e6, 2),
        "bandwidth_share": round(step_bytes / one / 1e6 / bandwidth, 3),
        "machine": machine_facts(("graphrt", "numpy", "numba", "torch", "transformers")),
        "command": "python -m graphrt.perf.bench_cpu " + " ".join(argv),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


def weight_bytes(ops: Ops, model_dir: Path) -> int:
    """Bytes of the matrices that a decode step reads once, as the engine stores them."""
    config = load_config(model_dir)
    return model_module(config.architecture).weight_bytes(ops, config, open_checkpoint(model_dir))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
