"""What the host does for a decode step, alone: the engine's loop over a device that needs no time.

The device makes the next token of every row at once, when somebody waits for it, as one that is always a little late. What is measured is
the engine's own work: taking records, planning, the delta record, reading the tokens, retirement, and the record to the server through a
real ring whose reader sleeps. Launches are left out, their cost is the driver's, and so are waits with what is done in them.

    python -m graphrt.perf.host_step [--batch 1,8,32,64] [--steps 2000] [--load steady|churn] [--cold] [--prompt] [--json]

steady: nobody comes or goes. churn: requests end all the time and others take their places. --cold: between two steps something
else goes through the processor's caches, as it may while a device works.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from graphrt.block_pool import BlockPool
from graphrt.capture.delta import DeltaWriter
from graphrt.capture.graph import GraphSet
from graphrt.capture.step_buffers import StepBuffers, StepSizes
from graphrt.capture.token_ring import TokenReader
from graphrt.engine import Engine
from graphrt.kernels import abi
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.numpy_step import apply_patches, next_step, slot_view
from graphrt.kernels.step_state import StepView
from graphrt.perf.machine import machine_facts
from graphrt.scheduler import Scheduler
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import EngineInfo, Sampling, Submit
from graphrt.seam.wires import ServerWires

VOCAB, CONTEXT, BLOCK_TOKENS, PROMPT = 128_256, 4096, 16, 40
WARM_UP = 64
COLD_BYTES = 4 << 20  # more than a core's own caches
LOADS = {"steady": (CONTEXT - PROMPT, CONTEXT - PROMPT), "churn": (50, 350)}  # shortest and longest answer


class NoDevice:
    """Steps whose samples are known before they run. Late, they run when somebody waits; else when they are launched."""

    def __init__(self, ops: NumpyOps, late: bool) -> None:
        self._ops, self._late = ops, late
        self._queue: deque[StepView] = deque()

    def graph(self, view: StepView) -> Replay:
        """What the engine launches."""
        return Replay(self, view)

    def launch(self, view: StepView) -> None:
        """Now or later."""
        self._queue.append(view)
        if not self._late:
            self.poll()

    def poll(self) -> None:
        """The oldest step runs."""
        b = self._queue.popleft()
        if b.kind == "decode":
            self._decode(b)
        else:
            self._ops.begin_step(b)
            b.next_tokens.np[:] = VOCAB // 2
            self._ops.commit_step(b)

    def _decode(self, b: StepView) -> None:
        """The same record as the step's own kernels make, for all rows at once."""
        step = next_step(b)
        delta, record = b.delta.np[step % b.delta.shape[0]], b.token_ring.np[step % b.token_ring.shape[0]]
        if delta[1]:
            apply_patches(delta, b)
        slots, rows = slot_view(b), b.decode_rows.np[: b.rows]
        live = np.flatnonzero((rows != abi.PAD) & (slots["state"][rows] == abi.SlotState.RUNNING))
        who = rows[live]
        length = slots["seq_len"][who] + 1
        tokens = (slots["last_token"][who] * 5 + 1) % VOCAB
        ends = length + 1 >= slots["max_len"][who]
        slots["seq_len"][who], slots["last_token"][who] = length, tokens
        slots["state"][who[ends]] = abi.SlotState.DONE
        out = record[abi.RECORD_HEADER :][: b.rows * abi.TOKEN_WORDS].reshape(b.rows, abi.TOKEN_WORDS).view(np.int32)
        out[:] = (abi.PAD, 0, 0, 0)
        out[live, 0], out[live, 1] = who, slots["serial"][who].view(np.int32)
        out[live, 2], out[live, 3] = tokens, ends * abi.TokenFlag.LENGTH
        record[1] = b.rows
        b.control.np[0] = step
        record[0] = step


@dataclass(frozen=True, slots=True)
class Replay:
    """A captured step."""

    device: NoDevice
    view: StepView

    def launch(self) -> None:
        """Queue it."""
        self.device.launch(self.view)


class Bench:
    """An engine, and the server's end of its seam, which takes what comes but sleeps before every step."""

    def __init__(self, batch: int, load: str, cold: bool, late: bool) -> None:
        ops, max_blocks = NumpyOps(), CONTEXT // BLOCK_TOKENS
        sizes = StepSizes((batch,), (64, 1024), (64,), 16)
        buffers = StepBuffers(ops, sizes, slots=batch, max_blocks=max_blocks, vocab=VOCAB, caches={})
        device = NoDevice(ops, late)
        graphs, delta = GraphSet(ops, buffers, device.graph), DeltaWriter(buffers.delta)
        reader = TokenReader(buffers.token_ring, buffers.logprob_ring, buffers.stamps, device.poll)
        pool = BlockPool(batch * max_blocks)
        scheduler = Scheduler(
            delta, pool, sizes, slots=batch, max_blocks=max_blocks, block_tokens=BLOCK_TOKENS, vocab=VOCAB,
            reuse_prefixes=True,
        )  # fmt: skip
        info = EngineInfo("none", "none", VOCAB, CONTEXT, batch, 256, BLOCK_TOKENS, pool.num_blocks, run_ahead=1)
        self.engine = Engine(graphs, scheduler, delta, reader, info, b"")
        self.batch, self.load, self.submitted = batch, LOADS[load], 0
        self.rng = np.random.default_rng(0)
        self.pollution = np.zeros(COLD_BYTES if cold else 1, np.uint8)
        self.wires = ServerWires(1 << 22)
        self.endpoint = EngineEndpoint(self.wires.engine_fds.duplicate())
        self.encode = msgspec.msgpack.Encoder().encode

    def submit(self) -> None:
        """One more request."""
        self.submitted += 1
        prompt = self.rng.integers(0, VOCAB, PROMPT).tolist()
        length = int(self.rng.integers(*self.load, endpoint=True))
        self.wires.tx.send(self.encode(Submit(self.submitted, prompt, Sampling(), length, [])))

    def step(self) -> float:
        """µs of the loop's own work for one step, by the engine's own clock; the batch is kept full."""
        while len(self.engine.scheduler.live) + self.queued() < self.batch:
            self.submit()
        self.pollution += 1
        self.engine.step(self.endpoint)
        while self.wires.rx.recv() is not None:
            pass
        self.wires.rx.bell.disarm()
        self.wires.rx.bell.arm()
        newest = self.engine.clock.recent(1)
        return newest[0].host_us if newest else 0.0

    def queued(self) -> int:
        """Requests on their way to the engine."""
        return 0 if self.endpoint._empty() else self.batch

    def close(self) -> None:
        """Give the rings back."""
        self.endpoint.close()
        self.wires.close()


@contextmanager
def timed(owner: Any, name: str, into: list[int]) -> Iterator[None]:
    """Adds to `into[0]` the ns spent in a method."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any) -> Any:
        start = time.perf_counter_ns()
        result = original(*args)
        into[0] += time.perf_counter_ns() - start
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


def measure(batch: int, steps: int, load: str, cold: bool, late: bool) -> dict[str, Any]:
    """µs a step: p50 and p99 of all, and the p50 of each part. Parts hold some 0.3 µs of measuring each."""
    bench = Bench(batch, load, cold, late)
    engine = bench.engine
    parts = {
        "plan": (engine.scheduler, "plan"),
        "publish": (engine.delta, "publish"),
        "retire": (engine.scheduler, "retire"),
        "emit": (bench.endpoint, "send"),
    }
    gc.collect()
    gc.freeze()
    while len(engine.scheduler.rows) < batch:
        bench.step()
    for _ in range(WARM_UP):
        bench.step()
    whole = [bench.step() for _ in range(steps)]
    split: dict[str, list[int]] = {}
    for part, (owner, name) in parts.items():
        split[part] = []
        into = [0]
        with timed(owner, name, into):
            for _ in range(max(steps // 4, 1)):
                into[0] = 0
                bench.step()
                split[part].append(into[0])
    bench.close()
    p50, p99 = np.percentile(whole, [50, 99])
    return {
        "batch": batch,
        "us_p50": round(float(p50), 2),
        "us_p99": round(float(p99), 2),
        **{part: round(float(np.percentile(ns, 50)) / 1e3, 2) for part, ns in split.items()},
    }


def main() -> None:
    """Print a line for every batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--load", choices=LOADS, default="steady")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--prompt", action="store_true", help="a device that has done a step as soon as it is launched")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(int(n), args.steps, args.load, args.cold, not args.prompt) for n in args.batch.split(",")]
    if args.json:
        print(json.dumps({"machine": machine_facts(("graphrt", "msgspec", "numpy")), "rows": rows}))
        return
    print(
        f"µs a step, {args.load}{', cold caches' * args.cold}{', prompt device' * args.prompt}: " + ", ".join(rows[0])
    )
    for row in rows:
        print("  ".join(f"{value:>8}" for value in row.values()))


if __name__ == "__main__":
    main()
