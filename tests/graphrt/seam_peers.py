"""The other side of the seam's tests: engines for `launch`, and child processes at the far end of a single ring."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time

import msgspec

from graphrt.engine_config import EngineConfig
from graphrt.errors import ModelError
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.records import Cancel, Drain, EngineInfo, Logprob, Output, Refused, Submit, TokenOut
from graphrt.seam.wires import Channel


def ready(max_waiting: int = 0) -> EngineInfo:
    return EngineInfo("test", "cpu", 1000, 4096, 8, max_waiting, 16, 0, 0, os.getpid())


def message(seed: int, largest: int) -> bytes:
    """The same bytes for the same seed, mostly small, now and then large."""
    source = random.Random(seed)
    size = source.randrange(largest + 1) if source.random() < 0.1 else source.randrange(64)
    return source.randbytes(size)


def echo(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """Answers each submit in one output with its tokens; `cached_tokens` says as how many-th it came (from 1)."""
    endpoint.send(ready())
    count = 0
    while endpoint.server_alive() and not endpoint.terminate_requested:
        for record in endpoint.poll():
            if isinstance(record, Submit):
                count += 1
                endpoint.send(Output([TokenOut(record.id, record.tokens, "stop", count)]))
            elif isinstance(record, Drain):
                return
        endpoint.wait(None)


def sleepy_echo(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """Looks at nothing for half a second after the first record, then echoes: its ring fills up meanwhile."""
    endpoint.send(ready())
    endpoint.wait(None)
    time.sleep(0.5)
    count = 0
    while endpoint.server_alive() and not endpoint.terminate_requested:
        for record in endpoint.poll():
            if isinstance(record, Submit | Cancel):
                count += 1
                endpoint.send(Output([TokenOut(record.id, [], "stop", count)]))
            elif isinstance(record, Drain):
                return
        endpoint.wait(None)


def flood(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """One request gets 200,000 tokens, one a record, as fast as the ring takes them: more than it holds."""
    endpoint.send(ready())
    endpoint.wait(None)
    for record in endpoint.poll():
        for index in range(200_000):
            endpoint.send(Output([TokenOut(record.id, [index], "length" if index == 199_999 else "")]))
    endpoint.wait(None)


def score(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """Each request gets the log-probabilities of its prompt in three records, then two tokens, all some time apart."""
    endpoint.send(ready())
    while endpoint.server_alive():
        for record in endpoint.poll():
            if isinstance(record, Submit):
                for i in range(3):
                    endpoint.send(Output([TokenOut(record.id, [], "", 0, [], [Logprob(i, -1.0, 1, [])])]))
                    time.sleep(0.02)
                endpoint.send(Output([TokenOut(record.id, [7])]))
                endpoint.send(Output([TokenOut(record.id, [8], "length")]))
            elif isinstance(record, Drain):
                return
        endpoint.wait(None)


def refuse(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    endpoint.send(ready())
    while endpoint.server_alive():
        for record in endpoint.poll():
            if isinstance(record, Submit):
                endpoint.send(Refused(record.id, 429, "4 requests wait already", "messages"))
            elif isinstance(record, Drain):
                return
        endpoint.wait(None)


def bad_model(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    raise ModelError(f"{config.model_dir}: no config.json")


def bug_at_start(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    raise ZeroDivisionError("a bug\nin two lines")


def bug_later(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """Sends two tokens, then fails on the third."""
    endpoint.send(ready())
    endpoint.wait(None)
    for record in endpoint.poll():
        endpoint.send(Output([TokenOut(record.id, [1])]))
        endpoint.send(Output([TokenOut(record.id, [2])]))
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS in decode_step")


def exits_early(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    print("cannot find libsomething.so", file=sys.stderr, flush=True)
    os._exit(7)


def never_ready(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    print("loading for ever", flush=True)
    while endpoint.server_alive():
        endpoint.wait(None)


def busy(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """Computes without ever looking at the seam, deaf to SIGTERM."""
    endpoint.send(ready())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def reports_signals(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """Waits; on SIGTERM says so in a last output and ends with 0."""
    endpoint.send(ready())
    requests: list[int] = []
    while not endpoint.terminate_requested:
        endpoint.wait(None)
        requests += [record.id for record in endpoint.poll() if isinstance(record, Submit)]
    endpoint.send(Output([TokenOut(request, [15], "cancelled") for request in requests]))


def no_reaction(config: EngineConfig, endpoint: EngineEndpoint) -> None:
    """Ready, then silent, but obedient to `Drain`: requests stay open."""
    endpoint.send(ready())
    while endpoint.server_alive() and not endpoint.terminate_requested:
        if any(isinstance(record, Drain) for record in endpoint.poll()):
            return
        endpoint.wait(None)


def _produce(channel: Channel, count: int, largest: int) -> None:
    for seed in range(count):
        payload = message(seed, largest)
        while not channel.send(payload):
            time.sleep(0)
        if seed % 997 == 0:
            time.sleep(0.002)


def sleep_on(channel: Channel, timeout_s: float) -> bool:
    """Wait for a message as a consumer does. False when nothing rang although one may have come."""
    if not channel.try_sleep():
        return True
    poller = select.poll()
    poller.register(channel.bell.fd, select.POLLIN)
    rang = bool(poller.poll(timeout_s * 1000))
    channel.bell.disarm()
    return rang


def _answer(inbound: Channel, outbound: Channel) -> None:
    """Ping-pong, with pauses of all lengths around the moment at which the other side falls asleep."""
    pauses = random.Random(1)
    while True:
        payload = inbound.recv()
        if payload is None:
            sleep_on(inbound, 5)
            continue
        for _ in range(pauses.randrange(300)):
            pass
        outbound.send(payload)
        if payload == b"end":
            return


if __name__ == "__main__":
    job, *numbers = msgspec.json.decode(sys.argv[1])
    if job == "produce":
        capacity, memory, bell, count, largest = numbers
        _produce(Channel(capacity, memory, bell), count, largest)
    elif job == "answer":
        capacity, memory_in, bell_in, memory_out, bell_out = numbers
        _answer(Channel(capacity, memory_in, bell_in), Channel(capacity, memory_out, bell_out))
