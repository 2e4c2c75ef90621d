"""The engine as a process: every way in which it, or its server, can fail to start and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from graphrt.engine_config import EngineConfig
from graphrt.errors import EngineDead, GraphrtError
from graphrt.seam.client import EngineClient
from graphrt.seam.records import Sampling
from graphrt.seam.stream import RequestStream

PEERS = str(Path(__file__).with_name("seam_peers.py"))
FAKE = "graphrt.perf.fake_engine:run_engine"
GREEDY = Sampling(temperature=0.0)


def run(job: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(job, 100))


async def launch(name: str, **more: Any) -> EngineClient:
    return await EngineClient.launch(EngineConfig("nowhere"), runner=f"{PEERS}:{name}", **more)


async def launch_fake(settings: str = "fake:step_ms=1") -> EngineClient:
    return await EngineClient.launch(EngineConfig(settings), runner=FAKE)


async def failure(stream: RequestStream) -> tuple[str, float]:
    """The message of the `EngineDead` that ends the stream, and when it came."""
    with pytest.raises(EngineDead) as caught:
        async for _ in stream:
            pass
    return str(caught.value), time.perf_counter()


def open_fds() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(links)


def children() -> set[int]:
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split()}
    return found


def process_state(pid: int) -> str:
    """One letter, or "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.fixture(scope="module")
def first_loop() -> None:
    """libuv opens a pipe for signals with the first loop of a process, and keeps it for all later ones."""
    run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_is_left_behind(first_loop: None) -> Any:
    fds, before = len(open_fds()), children()
    yield
    assert len(open_fds()) == fds, open_fds()
    assert children() <= before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_engine_fails_every_stream_at_once(number: signal.Signals) -> None:
    async def job() -> None:
        client = await launch_fake()
        streams = [client.submit([1], GREEDY, 10**6, []) for _ in range(20)]  # 8 run, 12 wait
        readers = [asyncio.create_task(failure(stream)) for stream in streams]
        unread = client.submit([1], GREEDY, 10**6, [])
        await asyncio.sleep(0.1)
        start = time.perf_counter()
        os.kill(client.info.pid, number)
        for message, when in await asyncio.gather(*readers):
            assert message == f"engine process {client.info.pid} was killed by {number.name}"
            assert when - start < 0.1
        await failure(unread)
        await client.wait_dead()
        assert not client.alive and number.name in client.death_reason
        with pytest.raises(EngineDead, match=number.name):
            client.submit([1], GREEDY, 1, [])
        streams[0].cancel()
        await client.close(5)
        await client.close(5)

    run(job())


def test_the_last_tokens_before_a_failure_arrive() -> None:
    async def job() -> None:
        client = await launch("bug_later")
        stream = client.submit([1], GREEDY, 9, [])
        await client.wait_dead()
        assert (await anext(stream)).tokens == [1, 2]
        message, _ = await failure(stream)
        assert message == client.death_reason == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS in decode_step"
        await client.close()

    run(job())


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        ("bad_model", r"^nowhere: no config\.json$"),
        ("bug_at_start", r"^ZeroDivisionError: a bug$"),
        ("absent", r"^engine runner '.*seam_peers\.py:absent': .* has no absent$"),
        ("exits_early", r"engine process \d+ exited with code 7; its last output:\ncannot find libsomething\.so$"),
    ],
)
def test_a_start_that_fails_says_why(runner: str, message: str) -> None:
    async def job() -> None:
        with pytest.raises(GraphrtError, match=message):
            await launch(runner)

    run(job())


def test_a_missing_module_is_named() -> None:
    async def job() -> None:
        with pytest.raises(GraphrtError, match=r"ModuleNotFoundError: No module named 'graphrt\.no_engine'"):
            await EngineClient.launch(EngineConfig("nowhere"), runner="graphrt.no_engine:run")

    run(job())


def test_a_start_that_takes_too_long_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    async def job() -> None:
        with pytest.raises(GraphrtError, match=r"not ready within 0\.5 s; its last output:\nloading for ever$"):
            await launch("never_ready", start_timeout_s=0.5)

    run(job())
    assert "loading for ever" in capfd.readouterr().err


def test_a_start_can_be_cancelled() -> None:
    async def job() -> None:
        task = asyncio.create_task(launch("never_ready"))
        await asyncio.sleep(0.3)
        assert children()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(job())


def test_a_bug_leaves_its_traceback_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    async def job() -> None:
        with pytest.raises(GraphrtError):
            await launch("bug_at_start")

    run(job())
    captured = capfd.readouterr()
    assert "Traceback" in captured.err and "in bug_at_start" in captured.err
    assert captured.out == ""


def test_close_ends_an_engine_that_is_deaf() -> None:
    async def job() -> None:
        client = await launch("busy")
        stream = client.submit([1], GREEDY, 1, [])
        start = time.perf_counter()
        await client.close(0.2)
        assert time.perf_counter() - start < 8
        assert "SIGKILL" in (await failure(stream))[0]

    run(job())


def test_sigterm_is_a_request_and_sigint_is_nothing() -> None:
    async def job() -> None:
        client = await launch("reports_signals")
        stream = client.submit([1], GREEDY, 1, [])
        os.kill(client.info.pid, signal.SIGINT)
        await asyncio.sleep(0.1)
        assert client.alive
        start = time.perf_counter()
        os.kill(client.info.pid, signal.SIGTERM)
        out = await anext(stream)
        assert (out.tokens, out.finish) == ([15], "cancelled")
        assert time.perf_counter() - start < 0.5  # it was asleep without a timeout
        await client.wait_dead()
        assert client.death_reason.endswith("exited with code 0")
        await client.close()

    run(job())


def test_ctrl_c_during_the_start_does_not_reach_the_engine() -> None:
    """From before exec until the engine ignores it, SIGINT must be blocked."""

    async def job() -> None:
        before = children()
        task = asyncio.create_task(launch_fake())
        interrupts = 0
        while not task.done():
            for pid in children() - before:
                os.kill(pid, signal.SIGINT)
                interrupts += 1
            await asyncio.sleep(0.001)
        client = await task
        assert client.alive and interrupts > 5
        await client.close()

    run(job())


@pytest.mark.parametrize("runner", [f"{PEERS}:busy", f"{PEERS}:never_ready", FAKE])
def test_the_engine_dies_with_its_server(runner: str) -> None:
    """However busy the engine is, and also while it starts."""
    program = textwrap.dedent(
        f"""
        import asyncio
        from graphrt.engine_config import EngineConfig
        from graphrt.seam.client import EngineClient

        async def main():
            await EngineClient.launch(EngineConfig("fake:step_ms=1"), runner={runner!r})
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", program]) as server:
        try:
            deadline = time.monotonic() + 20
            engine = 0
            while not engine and time.monotonic() < deadline:
                with contextlib.suppress(ValueError):
                    engine = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text())
                time.sleep(0.01)
            assert engine
            time.sleep(0.5)
            assert process_state(engine) in ("R", "S")
        finally:
            server.kill()
        start = time.monotonic()
        while process_state(engine) not in ("", "Z", "X") and time.monotonic() < start + 5:
            time.sleep(0.01)
        assert time.monotonic() - start < 1.0


def test_the_engine_waits_for_a_stopped_server() -> None:
    """A server that stands still (SIGSTOP, debugger) loses nothing; tested from outside of it."""
    program = textwrap.dedent(
        f"""
        import asyncio
        from graphrt.engine_config import EngineConfig
        from graphrt.seam.client import EngineClient
        from graphrt.seam.records import Sampling

        async def main():
            config = EngineConfig("nowhere")
            client = await EngineClient.launch(config, runner="{PEERS}:flood", ring_bytes=1 << 14)
            stream = client.submit([1], Sampling(), 1, [])
            print("going", flush=True)
            tokens = []
            async for out in stream:
                tokens += out.tokens
            print(tokens == list(range(200_000)), flush=True)
            await client.close()

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "going\n"
        for _ in range(3):
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(server.pid, signal.SIGCONT)
            time.sleep(0.02)
        assert server.stdout.readline() == "True\n"
        assert server.wait(20) == 0


def test_a_stray_module_in_the_working_directory_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)

    async def job() -> None:
        client = await launch_fake()
        await client.close()

    run(job())


def test_50_launches_leave_no_descriptor_and_no_zombie() -> None:
    async def job() -> None:
        await (await launch_fake()).close()
        fds, before = open_fds(), children()
        for turn in range(50):
            client = await launch_fake("fake:step_ms=0")
            stream = client.submit([1], GREEDY, 3, [])
            await anext(stream)
            if turn % 5 == 0:
                os.kill(client.info.pid, signal.SIGKILL)
                await client.wait_dead()
            if turn % 5 != 1:
                await client.close()
            else:
                os.kill(client.info.pid, signal.SIGKILL)  # died, and nobody closes
                await client.wait_dead()
        assert open_fds() == fds
        assert children() == before

    run(job())
