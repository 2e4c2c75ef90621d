"""The load generator: its formulas on made-up times, its client against a server that says when it sends."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from graphrt.cli.main import main
from graphrt.errors import ConfigError
from graphrt.perf.bench_client import EventReader, Target
from graphrt.perf.bench_serve import Load, dataset_requests, poisson, run_load
from graphrt.perf.bench_stats import RequestRecord, summarise


def record(start: float, events: list[float], tokens: int, error: str = "") -> RequestRecord:
    end = events[-1] if events else start + 1
    return RequestRecord(start, end, events, prompt_tokens=10, output_tokens=tokens, status=200, error=error)


def test_formulas() -> None:
    a = record(100.0, [100.2, 100.3, 100.7], 5)  # two tokens came in one event
    b = record(101.0, [101.1], 1)
    c = record(100.5, [], 0, "HTTP 429")
    out = summarise([a, b, c], {"ttft": 150.0, "tpot": 200.0})
    assert (out["requests"], out["completed"], out["errors"]) == (3, 2, {"HTTP 429": 1})
    assert out["duration_s"] == pytest.approx(1.5)  # from the first start to the end of the refused one
    assert out["ttft_ms"]["mean"] == pytest.approx(150.0) and out["ttft_ms"]["max"] == pytest.approx(200.0)
    assert out["tpot_ms"]["mean"] == pytest.approx(500 / 4)  # of the first alone
    assert out["itl_ms"]["min"] == pytest.approx(100.0) and out["itl_ms"]["max"] == pytest.approx(400.0)
    assert out["e2e_ms"]["p50"] == pytest.approx(400.0)
    assert out["output_tokens_per_s"] == pytest.approx(6 / 1.5)
    assert out["goodput_per_s"] == pytest.approx(1 / 1.5, abs=1e-3)  # the first was too slow, the third failed


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng().uniform(0.01, 2, 137)
    out = summarise([record(0.0, [float(v)], 1) for v in values], {})
    for p in (50, 90, 95, 99):
        assert out["ttft_ms"][f"p{p}"] == pytest.approx(np.percentile(values, p) * 1e3, abs=1e-3)


def test_nothing_ended_well() -> None:
    out = summarise([record(0.0, [], 0, "HTTP 503")], {"e2e": 1.0})
    assert out["completed"] == 0 and out["ttft_ms"] == {} and out["goodput_per_s"] == 0


def test_events_cut_anywhere() -> None:
    stream = (
        b': comment\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"h\xc3\xa9"}}]}\r\n\r\n'
        b'data: {"choices":[{"text":"x"}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 2, 5, len(stream)):
        r = RequestRecord(0.0)
        reader = EventReader(r)
        for i in range(0, len(stream), size):
            reader.feed(stream[i : i + size])
        assert reader.done and len(r.events) == 2 and (r.prompt_tokens, r.output_tokens, r.error) == (7, 3, "")


def test_arrivals_are_poisson_and_wait_for_nobody() -> None:
    async def times() -> list[float]:
        return [time.perf_counter() async for _ in poisson(list(range(400)), 2000.0, random.Random(1))]

    at = asyncio.run(times())
    gaps = np.diff(at)
    assert statistics.mean(gaps) == pytest.approx(1 / 2000, rel=0.3)
    rng = random.Random(1)
    assert at[-1] - at[0] == pytest.approx(sum(rng.expovariate(2000.0) for _ in range(399)), abs=0.05)


Handler = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]


async def with_server(handler: Handler, use: Callable[[Target], Awaitable[Any]], timeout_s: float = 10.0) -> Any:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await handler(writer, head.split(b"\r\n")[0] + b"\n" + await reader.readexactly(length))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await use(Target(f"http://127.0.0.1:{port}/v1", None, timeout_s))


def answer(value: Any) -> bytes:
    body = msgspec.json.encode(value)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def scripted(writer: asyncio.StreamWriter, request: bytes) -> None:
    """A model "m" whose replies take 50 ms to the first token and 20 ms to each later one."""
    if b"/v1/models" in request:
        writer.write(answer({"data": [{"id": "m"}]}))
        return
    if b"/tokenize" in request:
        writer.write(answer({"tokens": [5, 6, 7]}))
        return
    body = msgspec.json.decode(request.partition(b"\n")[2])
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for i in range(body["max_tokens"]):
        await asyncio.sleep(0.02 if i else 0.05)
        await send(writer, {"choices": [{"text": "x"}]})
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    await send(writer, {"choices": [], "usage": usage})
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    await writer.drain()


async def send(writer: asyncio.StreamWriter, event: Any) -> None:
    data = b"data: " + msgspec.json.encode(event) + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


@pytest.mark.parametrize(("rate", "concurrency"), [(200.0, None), (None, 3)])
def test_a_whole_run(rate: float | None, concurrency: int | None) -> None:
    load = Load(9, rate, concurrency, input_len=17, output_len=5, seed=1)
    seen: list[int] = []
    out = asyncio.run(with_server(scripted, lambda target: run_load(target, load, {"ttft": 5000.0}, seen.append)))
    assert seen == list(range(1, 10)) and out["completed"] == 9 and out["model"] == "m"
    assert (out["prompt_tokens"], out["output_tokens"]) == (9 * 17, 9 * 5)
    # Sleeps never end early; how late depends on the machine.
    assert 50 <= out["ttft_ms"]["min"] < 500 and 20 <= out["tpot_ms"]["p50"] < 200 and out["e2e_ms"]["min"] >= 130
    assert out["goodput_per_s"] == pytest.approx(out["requests_per_s"], abs=1e-3)


def test_what_goes_wrong_is_counted() -> None:
    async def refuse(writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(b"HTTP/1.1 429 Too Many\r\ncontent-length: 0\r\n\r\n")

    async def cut(writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await send(writer, {"choices": [{"text": "x"}]})

    async def fail(writer: asyncio.StreamWriter, request: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await send(writer, {"error": {"message": "engine died"}})
        writer.write(b"0\r\n\r\n")

    async def hang(writer: asyncio.StreamWriter, request: bytes) -> None:
        await asyncio.sleep(5)

    cases = {refuse: "HTTP 429", cut: "RemoteProtocolError", fail: "error in the stream", hang: "no end within 0.5 s"}
    for handler, want in cases.items():
        got = asyncio.run(with_server(handler, lambda target: target.stream("/v1/completions", {}), timeout_s=0.5))
        assert got.error == want


def test_data_sets(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    load = Load(3, None, 1, 1, 64, 0, dataset=file)
    made = dataset_requests(load, {"model": "m"}, random.Random(0))
    assert [path for path, _ in made] == ["/v1/completions", "/v1/chat/completions", "/v1/completions"]
    assert [body["max_tokens"] for _, body in made] == [3, 64, 3]
    for text, words in (("", "is empty"), ("{}", "line 1: needs an object with messages or prompt"), ("{", "line 1: ")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            dataset_requests(load, {}, random.Random(0))


def test_the_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("graphrt bench: error: no server at 127.0.0.1:9")
    assert main(["bench", "serve", "--url", "ftp://x"]) == 1
    assert "must be http://host:port" in capsys.readouterr().err
    for wrong in (["--slo", "speed:3"], ["--rate", "1", "--concurrency", "2"], ["--requests", "0"]):
        with pytest.raises(SystemExit) as end:
            main(["bench", "serve", *wrong])
        assert end.value.code == 2
