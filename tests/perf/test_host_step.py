"""The benchmark of the host's share of a step: its device says what a step would, and its numbers are those of the engine's clock."""

from __future__ import annotations

import itertools

import pytest

from graphrt.perf.host_step import LOADS, VOCAB, Bench, measure


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("load", LOADS)
def test_the_engine_is_content_with_the_device(load: str, late: bool) -> None:
    """Requests join, run and end; every record is what the engine expects of its slots."""
    bench = Bench(5, load, cold=False, late=late)
    for _ in range(700):
        assert bench.step() >= 0
    engine = bench.engine
    stats = engine.stats()
    assert stats.decode_steps > 400 and stats.generation_tokens > 2000
    assert (stats.finished.get("length", 0) > 3) == (load == "churn")
    for seq in engine.scheduler.rows:
        output = seq.tokens[seq.prompt_len :]
        assert all(b == (a * 5 + 1) % VOCAB for a, b in itertools.pairwise(output))
    bench.close()


def test_what_is_reported() -> None:
    found = measure(3, 40, "steady", cold=True, late=True)
    assert found["batch"] == 3 and 0 < found["us_p50"] <= found["us_p99"]
    assert all(found[part] > 0 for part in ("plan", "publish", "retire", "emit"))
    assert found["us_p50"] < 10_000
