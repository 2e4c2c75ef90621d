"""The ends of a decode step on a device: microseconds a launch of begin_step, sample in its modes, and commit_step.

A captured graph holds REPEATS launches of one kernel; a launch's time is that of a replay over REPEATS, so it includes the gap to
the next kernel, as in a step. Twice: with programmatic edges, as steps have them, and with plain ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from graphrt.capture.delta import DeltaWriter
from graphrt.capture.step_buffers import StepBuffers, StepSizes
from graphrt.kernels import abi
from graphrt.kernels.abi import Field, SlotState
from graphrt.kernels.cuda.begin_step import begin_step
from graphrt.kernels.cuda.commit_step import commit_step
from graphrt.kernels.cuda.driver import KernelCall
from graphrt.kernels.cuda.sample import cluster_of, sample, workspace_shape
from graphrt.perf.device_time import graph_us

REPEATS = 50
SEQ_LEN = 500
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 50, top_p 0.9, min_p 0.02": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "sampled, penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "greedy, logprobs": {"num_logprobs": 20},
}


class Ends:
    """A batch of running sequences."""

    def __init__(self, driver: Any, batch: int, vocab: int, seed: int) -> None:
        self.driver, self.batch = driver, batch
        ops: Any = SimpleNamespace(alloc=driver.alloc, alloc_mapped=driver.alloc_mapped)
        self.buffers = StepBuffers(
            ops, StepSizes((batch,), (64,), (8,), 1), slots=batch, max_blocks=64, vocab=vocab, caches={}
        )
        self.view = self.buffers.view("decode", batch)
        self.delta = DeltaWriter(self.buffers.delta)
        self.workspace = driver.alloc(workspace_shape(), np.uint32)
        self.logits = driver.alloc((batch, vocab), np.float32)
        rng = np.random.default_rng(seed)
        # A step's logits: most of them in a bell, some dozens far above it.
        logits = (rng.standard_normal((batch, vocab)) * 2.5).astype(np.float32)
        logits[:, rng.permutation(vocab)[:64]] += rng.exponential(4, 64).astype(np.float32) + 8
        driver.upload(self.logits, logits)
        for name, values in (("row_slot", np.arange(batch)), ("sample_rows", np.arange(batch))):
            self._set(name, np.resize(values, getattr(self.buffers, name).shape))
        self._set("positions", np.full(self.buffers.positions.shape, SEQ_LEN))
        self._set("targets", np.full(self.buffers.targets.shape, abi.PAD))

    def _set(self, name: str, values: Any) -> None:
        array = getattr(self.buffers, name)
        self.driver.upload(array, np.asarray(values).astype(array.dtype))

    def slots(self, **fields: Any) -> None:
        """Every slot runs, with these parameters."""
        slots = np.zeros(self.batch, abi.SLOT)
        defaults = {
            "seq_len": SEQ_LEN, "max_len": 1 << 30, "state": SlotState.RUNNING, "top_p": 1, "repetition_penalty": 1,
            "num_logprobs": -1, "seed_lo": np.arange(self.batch),
        }  # fmt: skip
        for name, value in (defaults | fields).items():
            slots[name] = value
        self._set("slots", slots.view(np.int32).reshape(self.batch, abi.SLOT_WORDS))

    def record(self) -> None:
        """The record of the next step: the rows, and a new block for each."""
        self._set("control", np.zeros(4))
        self.delta.step = 0
        self.delta.patch(Field.DECODE_ROWS, 0, list(range(self.batch)))
        for slot in range(self.batch):
            self.delta.patch(Field.BLOCK_TABLE, slot * 64 + 5, [7])
        self.delta.publish()

    def cases(self) -> Iterator[tuple[str, KernelCall]]:
        """Names and launches; the state is set for each when it is asked for."""
        self.slots()
        self.record()
        yield "begin_step", begin_step(self.view)
        yield "commit_step", commit_step(self.view)
        best = cluster_of(self.driver, self.batch)
        for name, fields in MODES.items():
            self.slots(**fields)
            yield f"sample {name}", sample(self.driver, self.logits, self.view)
        for name in ("greedy", "sampled"):
            self.slots(**MODES[name])
            for cluster in (1, 2, 4, 8):
                if cluster != best:
                    call = sample(self.driver, self.logits, self.view, cluster=cluster)
                    yield f"sample {name}, cluster {cluster}", call
            yield f"sample {name} + commit", sample(self.driver, self.logits, self.view, self.workspace)


def launch_us(driver: Any, call: KernelCall) -> float:
    """Microseconds from one launch to the next in a graph."""
    driver.prepare([call.spec])
    graph = driver.capture(lambda: [driver.launch(call) for _ in range(REPEATS)])
    return statistics.median(graph_us(driver, graph, replays=20, rounds=7)) / REPEATS


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from graphrt.kernels.cuda.cuda_driver import CudaDriver

    driver = CudaDriver()
    table: dict[str, dict[int, tuple[float, float]]] = {}
    for batch in options.batch:
        for name, call in Ends(driver, batch, options.vocab, seed=batch).cases():
            times = launch_us(driver, call), launch_us(driver, replace(call, pdl=False))
            table.setdefault(name, {})[batch] = times
    print(f"{driver.name}, vocabulary {options.vocab}: microseconds a launch, programmatic edges (plain edges)")
    print(f"{'':44}" + "".join(f"{f'batch {b}':>18}" for b in options.batch))
    for name, of in table.items():
        cells = "".join(f"{f'{of[b][0]:.2f} ({of[b][1]:.2f})' if b in of else '':>18}" for b in options.batch)
        print(f"{name:44}{cells}")
    if options.out:
        rows = [
            {"kernel": n, "batch": b, "us": t[0], "us_plain": t[1]} for n, of in table.items() for b, t in of.items()
        ]
        options.out.write_text(json.dumps({"card": driver.name, "vocab": options.vocab, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
