"""The ring and its doorbell: nothing lost, nothing reordered, nothing torn taken for good, no wake-up missed."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphrt.seam.doorbell import create_doorbell_fd
from graphrt.seam.ring import HEADER_BYTES, MessageTooLarge, Ring, RingCorrupt, create_ring_memory
from graphrt.seam.wires import Channel

PEERS = Path(__file__).with_name("seam_peers.py")
CAPACITY = 4096


def load_peers() -> Any:
    spec = importlib.util.spec_from_file_location("seam_peers_for_ring", PEERS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers = load_peers()


@pytest.fixture
def pair() -> Iterator[tuple[Ring, Ring]]:
    fd = create_ring_memory(CAPACITY)
    producer, consumer = Ring(fd, CAPACITY), Ring(fd, CAPACITY)
    os.close(fd)
    yield producer, consumer
    producer.close()
    consumer.close()


def test_random_pushes_and_pops_equal_a_queue(pair: tuple[Ring, Ring]) -> None:
    producer, consumer = pair
    source = random.Random(0)
    model: deque[bytes] = deque()
    refused = wrapped = 0
    for _ in range(20_000):
        if source.random() < 0.55:
            payload = source.randbytes(int(source.random() ** 4 * (CAPACITY - 8 + 1)))
            room = CAPACITY - sum(8 + (len(waiting) + 7) // 8 * 8 for waiting in model)
            fits = 8 + (len(payload) + 7) // 8 * 8 <= room
            assert producer.push(payload) is fits
            if fits:
                model.append(payload)
            refused += not fits
        else:
            assert consumer.empty() is (not model)
            assert consumer.pop() == (model.popleft() if model else None)
            wrapped += 1
    assert refused > 100 and wrapped > 1000
    while model:
        assert consumer.pop() == model.popleft()
    assert consumer.pop() is None


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, CAPACITY - 9, CAPACITY - 8])
def test_every_offset_of_the_wrap(pair: tuple[Ring, Ring], size: int) -> None:
    producer, consumer = pair
    payload = bytes(i * 7 & 255 for i in range(size))
    for _ in range(2 * CAPACITY // 8):
        assert producer.push(payload) and consumer.pop() == payload
        assert producer.push(b"") and consumer.pop() == b""  # moves the next one on by 8 bytes


def test_a_message_that_never_fits_is_an_error_and_leaves_the_ring_whole(pair: tuple[Ring, Ring]) -> None:
    producer, consumer = pair
    assert producer.push(b"before")
    with pytest.raises(MessageTooLarge, match=f"{CAPACITY - 7} bytes does not fit a ring of {CAPACITY - 8}"):
        producer.push(bytes(CAPACITY - 7))
    assert producer.push(b"after")
    assert [consumer.pop(), consumer.pop(), consumer.pop()] == [b"before", b"after", None]


@pytest.mark.parametrize("at", [0, 4, 8, 15, 40])  # length, checksum, payload
def test_a_torn_message_is_never_returned(pair: tuple[Ring, Ring], at: int) -> None:
    producer, consumer = pair
    producer.push(b"x" * 33)
    producer._map[HEADER_BYTES + at] ^= 0x40
    with pytest.raises(RingCorrupt, match="byte 0 of the ring"):
        consumer.pop()
    producer._map[HEADER_BYTES + at] ^= 0x40
    assert consumer.pop() == b"x" * 33


def test_bytes_that_become_visible_late_are_waited_for(pair: tuple[Ring, Ring]) -> None:
    producer, consumer = pair
    producer.push(b"late bytes")
    good = producer._map[HEADER_BYTES + 8]
    producer._map[HEADER_BYTES + 8] = 0

    def restore() -> None:
        time.sleep(0.003)
        producer._map[HEADER_BYTES + 8] = good

    thread = threading.Thread(target=restore)
    thread.start()
    assert consumer.pop() == b"late bytes"
    thread.join()


def test_a_message_of_the_previous_lap_is_not_taken_for_a_new_one(pair: tuple[Ring, Ring]) -> None:
    producer, consumer = pair
    payload = b"y" * 1016  # 1,024 bytes with its word: four fill the ring
    for _ in range(4):
        assert producer.push(payload)
        assert consumer.pop() == payload
    producer._words[8] += 1024  # the new tail is visible, the new bytes are not yet
    with pytest.raises(RingCorrupt):
        consumer.pop()


def test_capacity_is_checked() -> None:
    for capacity in (0, 100, 4097, 12288, 1 << 32):
        with pytest.raises(ValueError, match=f"ring capacity {capacity}"):
            create_ring_memory(capacity)


def make_channel(capacity: int) -> tuple[Channel, int]:
    memory = create_ring_memory(capacity)
    return Channel(capacity, memory, create_doorbell_fd()), memory


@pytest.mark.parametrize("slow", [False, True])
def test_20k_messages_between_two_processes(slow: bool) -> None:
    capacity, count, largest = 16384, 20_000, 16384 - 8
    channel, memory = make_channel(capacity)
    job = json.dumps(["produce", capacity, memory, channel.bell.fd, count, largest])
    with subprocess.Popen([sys.executable, PEERS, job], pass_fds=[memory, channel.bell.fd]) as child:
        for seed in range(count):
            while (payload := channel.recv()) is None:
                assert peers.sleep_on(channel, 10), f"nothing rang before message {seed}"
            assert payload == peers.message(seed, largest), f"message {seed}"
            if slow and seed % 499 == 0:
                time.sleep(0.005)
        assert child.wait(10) == 0
    assert channel.recv() is None
    os.close(memory)
    channel.close()


@pytest.mark.parametrize("always", [False, True])
def test_no_wake_up_is_lost(always: bool) -> None:
    """Both sides sleep between any two messages, so that nearly every push meets a consumer about to sleep."""
    capacity, rounds = 4096, 15_000
    out, out_memory = make_channel(capacity)
    back, back_memory = make_channel(capacity)
    out.bell._always = always
    fds = [out_memory, out.bell.fd, back_memory, back.bell.fd]
    pauses = random.Random(2)
    with subprocess.Popen([sys.executable, PEERS, json.dumps(["answer", capacity, *fds])], pass_fds=fds) as child:
        try:
            for number in range(rounds + 1):
                payload = b"end" if number == rounds else number.to_bytes(4, "little")
                assert out.send(payload)
                for _ in range(pauses.randrange(300)):
                    pass
                while (answer := back.recv()) is None:
                    assert peers.sleep_on(back, 2), f"the wake-up for answer {number} was lost"
                assert answer == payload
            assert child.wait(10) == 0
        finally:
            child.kill()
    for fd in (out_memory, back_memory):
        os.close(fd)
    out.close()
    back.close()


def test_the_doorbell_is_left_alone_while_the_consumer_is_awake() -> None:
    channel, memory = make_channel(CAPACITY)
    os.close(memory)
    channel.bell._always = False
    channel.send(b"a")
    with pytest.raises(BlockingIOError):
        os.eventfd_read(channel.bell.fd)
    assert channel.recv() == b"a"
    assert channel.try_sleep()
    channel.send(b"b")
    channel.send(b"c")
    assert os.eventfd_read(channel.bell.fd) == 1  # the second found it awake
    assert not channel.try_sleep()
    channel.close()
