"""The life of a whole server process with an engine process: start, drain, deaths, exit codes."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

PROGRAM = Path(__file__).with_name("scripted.py")
HI: list[Any] = [{"role": "user", "content": "hi"}]


class Process:
    """scripted.py as a process; `lines` are those it printed."""

    def __init__(self, *words: str, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(port), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_line(self, start: str) -> str:
        end = time.monotonic() + 20
        while (line := self._queue.get(timeout=max(0.0, end - time.monotonic()))) is not None:
            self.lines.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"it ended without {start!r}: {self.lines}")

    def ready(self) -> Process:
        line = self.wait_line("graphrt serves tiny on http://127.0.0.1:")
        self.url = line.split(" on ")[1].split(" ")[0]
        self.wait_line("curl -N " + self.url)
        return self

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def end(self, within_s: float = 15) -> int:
        return self.process.wait(within_s)

    def engine_pid(self) -> int:
        [pid] = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(pid)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def make(*words: str, **options: Any) -> Process:
        made.append(Process(*words, **options))
        return made[-1]

    yield make
    for process in made:
        process.process.kill()
        process.process.wait()


class Stream(threading.Thread):
    """One streamed reply in the background."""

    def __init__(self, server: Process, max_tokens: int | None) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.finish: str | None = None
        self.error: Exception | None = None
        self.begun = threading.Event()
        self._server = server
        self._max_tokens = max_tokens
        self.start()
        assert self.begun.wait(10)

    def run(self) -> None:
        try:
            stream = self._server.client().chat.completions.create(
                model="tiny", messages=HI, stream=True, seed=1, max_tokens=self._max_tokens
            )
            for chunk in stream:
                self.text += chunk.choices[0].delta.content or ""
                self.finish = chunk.choices[0].finish_reason
                self.begun.set()
        except Exception as error:
            self.error = error
        self.begun.set()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_requests_finish(start: Any, number: int) -> None:
    server = start().ready()
    engine = server.engine_pid()
    stream = Stream(server, 300)
    server.process.send_signal(number)
    time.sleep(0.4)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")
    assert stream.is_alive()
    assert server.end() == 0
    stream.join(5)
    assert (stream.error, stream.finish, stream.text) == (None, "length", ("word 1 " * 300)[:300])
    assert gone(engine)


def test_a_drain_is_bounded_and_says_so(start: Any) -> None:
    server = start("drain_timeout_s=0.3").ready()
    stream = Stream(server, None)
    before = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert time.monotonic() - before < 5
    stream.join(5)
    assert isinstance(stream.error, openai.APIError) and "shutting down" in str(stream.error)


def test_a_second_ctrl_c_ends_at_once(start: Any) -> None:
    server = start().ready()
    engine = server.engine_pid()
    stream = Stream(server, None)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert server.process.poll() is None
    before = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 0
    assert time.monotonic() - before < 5
    stream.join(5)
    assert stream.error is not None and not stream.is_alive()
    assert gone(engine)


def test_an_idle_connection_does_not_hold_up_the_end(start: Any) -> None:
    server = start().ready()
    with httpx.Client() as client:
        assert client.get(server.url + "/health").status_code == 200
        before = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert time.monotonic() - before < 3


def test_a_stop_while_loading(start: Any) -> None:
    server = start("model=/models/slow")
    server.wait_line("launching")
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


def test_the_engines_death_is_told_and_ends_the_server(start: Any) -> None:
    server = start("death_grace_s=1.5").ready()
    stream = Stream(server, None)
    os.kill(server.engine_pid(), signal.SIGKILL)
    stream.join(5)
    assert isinstance(stream.error, openai.APIError) and "engine" in str(stream.error)
    health = httpx.get(server.url + "/health")
    assert health.status_code == 503 and health.json()["status"] == "dead" and health.json()["reason"]
    with pytest.raises(openai.InternalServerError) as caught:
        server.client().chat.completions.create(model="tiny", messages=HI)
    assert caught.value.status_code == 503
    assert server.end() == 1


def test_a_request_that_kills_the_engine_gets_an_error(start: Any) -> None:
    server = start("death_grace_s=0").ready()
    with pytest.raises(openai.InternalServerError) as caught:
        server.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": "crash"}])
    assert caught.value.status_code == 500
    assert server.end() == 1


def test_a_stuck_engine_does_not_keep_the_server(start: Any) -> None:
    server = start("drain_timeout_s=0.2").ready()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "stuck"}]}
    errors: list[Any] = []
    thread = threading.Thread(
        target=lambda: errors.append(httpx.post(server.url + "/v1/chat/completions", json=body, timeout=20))
    )
    thread.start()
    time.sleep(0.3)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    thread.join(5)
    assert errors[0].status_code == 503 and "shutting down" in errors[0].json()["error"]["message"]


def test_a_port_in_use_is_told_before_anything_is_loaded(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(port=port)
        line = server.wait_line("error: ")
    assert line.startswith(f"error: port {port} on 127.0.0.1 is in use")
    assert server.lines == [line]
    assert server.end() == 1


def test_an_engine_that_cannot_load_is_told_in_its_own_words(start: Any) -> None:
    server = start("model=/models/broken")
    assert "model.safetensors is truncated: 10 bytes of 100" in server.wait_line("error: ")
    assert server.end() == 1


def test_a_model_without_text_is_told_in_one_line() -> None:
    """The engine that was loading meanwhile is ended without a word."""
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, str(PROGRAM), "0", "model=/models/textless"], capture_output=True, text=True, timeout=20
        )
        assert ended.stdout == "launching\nerror: /models/textless has no tokenizer.json\n"
        assert ended.stderr == "" and ended.returncode == 1


def test_a_setting_out_of_range_is_named(start: Any) -> None:
    server = start("keep_alive_s=0")
    assert server.wait_line("error: ") == "error: keep_alive_s is 0.0: must be from 1 to 3600"
    assert server.end() == 1
