"""Requests made up from /openapi.json, valid and not: whatever comes, the server answers in time, as documented."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, given, settings, strategies  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
PER_OPERATION = {"post": 240, "get": 24}
LEAST_CASES = 1000
TIMEOUT_S = 5.0
EOS = 256


async def short_reply(stream: Any) -> None:
    """Ends as the engine would: after the tokens asked for, if these are few."""
    count = min(3, stream.request.max_tokens)
    for _ in range(count - 1):
        stream.put("x")
        await asyncio.sleep(0)
    stream.put("x" if count < 3 else [EOS], "length" if count < 3 else "stop")


def test_no_made_up_request_gets_an_undocumented_answer(server: Any) -> None:
    server.engine.script = short_reply
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    seen: Counter[int] = Counter()

    for result in schema.get_all_operations():
        operation = result.ok()
        modes = [GenerationMode.POSITIVE, GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
        cases = strategies.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

        @settings(
            max_examples=PER_OPERATION[operation.method],
            phases=[Phase.explicit, Phase.generate],
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def run(case: Any) -> None:
            reply = case.call(timeout=TIMEOUT_S)
            seen[reply.status_code] += 1
            hurried = (
                float(case.headers.get("x-request-timeout", TIMEOUT_S)) < TIMEOUT_S
                if reply.status_code == 504
                else False
            )
            assert reply.status_code < 500 or hurried, reply.text
            case.validate_response(reply, checks=CHECKS)

        run()
    assert seen.total() >= LEAST_CASES
    assert seen[200] >= LEAST_CASES / 10 and seen[400] >= LEAST_CASES / 10, seen
    assert not server.call(lambda: len(server.state.live))
