"""What the engine says of the time that requests wait for a slot."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from engine_script import GREEDY, Script, settle

from graphrt.engine_config import EngineConfig
from graphrt.engine_setup import build_engine
from graphrt.queue_times import QueueTimes
from graphrt.seam.records import QUEUE_BOUNDS_S, Cancel, Submit


def test_buckets() -> None:
    times = QueueTimes()
    for wait in (0.0, QUEUE_BOUNDS_S[0], QUEUE_BOUNDS_S[0] * 1.01, QUEUE_BOUNDS_S[-1], QUEUE_BOUNDS_S[-1] + 1):
        times.add(wait)
    assert times.counts == [2, 1, *[0] * (len(QUEUE_BOUNDS_S) - 3), 1, 1]
    assert times.sum_s == sum((0.001, 0.00101, 300.0, 301.0))


def test_the_second_request_waits_for_the_first(tiny_model: Callable[..., Path]) -> None:
    engine = build_engine(EngineConfig(str(tiny_model("llama")), context=128, max_batch=1))
    script = Script(
        inbox=[Submit(1, [5, 6], GREEDY, 40, []), Submit(2, [7], GREEDY, 1, []), Submit(3, [8], GREEDY, 1, [])]
    )
    engine.step(script)
    assert sum(engine.stats().queue_counts) == 1
    script.inbox.append(Cancel(3))  # it was never admitted, and counts as no wait
    time.sleep(0.15)
    settle(engine, script)
    stats = engine.stats()
    assert sum(stats.queue_counts) == 2 and 0.15 <= stats.queue_sum_s < 5
    assert sum(stats.queue_counts[QUEUE_BOUNDS_S.index(0.1) + 1 :]) == 1


def test_a_preempted_request_waits_once(tiny_model: Callable[..., Path]) -> None:
    config = EngineConfig(str(tiny_model("llama")), context=128, max_batch=4)
    block = build_engine(config).graphs.buffers.caches["kv"].nbytes
    engine = build_engine(EngineConfig(config.model_dir, context=128, max_batch=4, kv_bytes=block // 3))
    script = Script(inbox=[Submit(i, [i] * 20, GREEDY, 90, []) for i in range(4)])
    settle(engine, script)
    stats = engine.stats()
    assert stats.preemptions > 0 and sum(stats.queue_counts) == 4
