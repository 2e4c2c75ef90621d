"""One line a request, in words or as JSON, whatever the request holds."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from graphrt.api.log_format import FIELDS, JsonFormatter, LineLog, setup_logging

PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The fields of every request's line so far."""
    with caplog.at_level(logging.DEBUG, logger="graphrt.api.requests"):
        yield lambda: [getattr(r, FIELDS) for r in caplog.records if r.name == "graphrt.api.requests"]


def test_the_line_of_a_generation(server: Any, requests: Any, caplog: pytest.LogCaptureFixture) -> None:
    httpx.post(server.url + PATH, json=BODY, headers={"x-request-id": "mine"})
    server.until(lambda: len(requests()) == 1)
    [line] = requests()
    assert 0 < line.pop("ms") < 10_000
    assert line == {
        "method": "POST",
        "path": PATH,
        "status": 200,
        "request_id": "mine",
        "prompt_tokens": 19,
        "completion_tokens": 15,
        "cached_tokens": 3,
        "finish": "stop",
    }
    assert f"request method=POST path='{PATH}' status=200 ms=" in caplog.text
    assert "prompt_tokens=19 completion_tokens=15 cached_tokens=3 finish=stop" in caplog.text


def test_every_request_has_one_line(server: Any, requests: Any) -> None:
    httpx.get(server.url + "/health")
    httpx.get(server.url + "/nothing")
    httpx.post(server.url + PATH, json={**BODY, "temperature": 9})
    with httpx.stream("POST", server.url + PATH, json={**BODY, "stream": True, "stop": "w"}) as reply:
        reply.read()
    server.until(lambda: len(requests()) == 4)
    lines = requests()
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/health", 200),
        ("/nothing", 404),
        (PATH, 400),
        (PATH, 200),
    ]
    assert "finish" not in lines[2]
    assert (lines[3]["finish"], lines[3]["completion_tokens"]) == ("stop", len("Hello, w"))


def test_a_client_that_left_is_a_499(server: Any, requests: Any) -> None:
    async def endless(stream: Any) -> None:
        stream.put("word ")
        await stream.cancelled.wait()

    server.engine.script = endless
    with httpx.stream("POST", server.url + PATH, json={**BODY, "stream": True}) as reply:
        next(reply.iter_raw())
    server.until(lambda: len(requests()) == 1)
    assert (requests()[0]["status"], requests()[0]["finish"], requests()[0]["completion_tokens"]) == (499, "abort", 5)


def test_line_breaks_in_a_path_make_no_line(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        httpx.get(server.url + "/a%0aERROR%20graphrt:%20all%20is%20lost%ed%a0%80")
    messages = [record.getMessage() for record in caplog.records if record.name == "graphrt.api.requests"]
    assert len(messages) == 1 and "\n" not in messages[0] and r"\nERROR graphrt" in messages[0]


def format_json(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def record(message: str, *args: object, exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord("graphrt.x", logging.WARNING, __file__, 1, message, args, exc_info)


def test_json_lines() -> None:
    made = record("two\nlines and %s", '"quotes"')
    made.created, made.msecs = 1764560000.25, 250.0
    assert format_json(made) == {
        "time": "2025-12-01T03:33:20.250Z",
        "level": "warning",
        "logger": "graphrt.x",
        "message": 'two\nlines and "quotes"',
    }
    made = record("not shown")
    setattr(made, FIELDS, {"path": "/\ud800", "status": 404})
    line = format_json(made)
    assert (line["path"], line["status"], "message" in line) == ("/?", 404, False)
    try:
        raise ValueError("deep")
    except ValueError:
        line = format_json(record("failed", exc_info=sys.exc_info()))
    assert "ValueError: deep" in line["exception"] and line["message"] == "failed"


def test_levels() -> None:
    root = logging.getLogger()
    before, handlers = root.level, root.handlers[:]
    stream = io.StringIO()
    try:
        setup_logging("warning", True, stream)
        logging.getLogger("graphrt.a").info("quiet")
        logging.getLogger("graphrt.a").warning("loud")
    finally:
        root.setLevel(before)
        root.handlers[:] = handlers
    [line] = stream.getvalue().splitlines()
    assert json.loads(line)["message"] == "loud"


def test_what_another_program_prints_becomes_lines(caplog: pytest.LogCaptureFixture) -> None:
    output = LineLog("graphrt.engine")
    with caplog.at_level(logging.INFO):
        for piece in ("one\ntw", "o\n\n  \nthr", "ee", ""):
            output.write(piece)
    assert [(entry.name, entry.getMessage()) for entry in caplog.records] == [
        ("graphrt.engine", "one"),
        ("graphrt.engine", "two"),
        ("graphrt.engine", "three"),
    ]


def test_a_whole_server_logs_json_only() -> None:
    program = Path(__file__).with_name("scripted.py")
    process = subprocess.Popen(
        [sys.executable, str(program), "0", "log_json=1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("graphrt serves"))
    url = line.split(" on ")[1].split(" ")[0]
    httpx.post(url + PATH, json={**BODY, "max_tokens": 3})
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=15)
    lines = [json.loads(entry) for entry in errors.splitlines()]
    assert process.returncode == 0
    [mine] = [entry for entry in lines if entry.get("path") == PATH]
    assert (mine["status"], mine["completion_tokens"], mine["finish"], mine["level"]) == (200, 3, "length", "info")
