"""Token buckets and counts of requests under way, on a clock of the test's own."""

from __future__ import annotations

import random

import pytest

from graphrt.api.auth_keys import ApiKey
from graphrt.api.rate_bucket import TokenBucket
from graphrt.api.rate_limits import Limits, RateLimiter, TooMany


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(name: str = "alice", concurrency: int | None = None, rpm: int | None = None) -> ApiKey:
    return ApiKey(name, b"", concurrency, rpm)


@pytest.mark.parametrize("rpm", [1, 7, 60, 1000])
def test_whoever_waits_as_told_passes_and_nobody_sooner(rpm: int) -> None:
    draw, clock = random.Random(rpm), 0.0
    bucket = TokenBucket(rpm, clock)
    passed = 0
    for _ in range(3000):
        wait = bucket.wait_s(clock)
        if wait == 0:
            bucket.take(clock)
            passed += 1
        elif draw.random() < 0.5:
            clock += wait * 0.99
            assert bucket.wait_s(clock) > 0 or wait < 1e-3
        else:
            clock += wait
            assert bucket.wait_s(clock) == 0
        clock += draw.choice([0.0, draw.random() * 60 / rpm])
        assert passed <= rpm + clock * rpm / 60 + 1e-6


def test_a_full_bucket_holds_one_minute() -> None:
    bucket = TokenBucket(3, 0.0)
    for _ in range(3):
        assert bucket.wait_s(1e6) == 0
        bucket.take(1e6)
    assert bucket.wait_s(1e6) == pytest.approx(20.0)


def test_the_rate_of_a_key_and_its_true_retry_after() -> None:
    clock = Clock()
    limiter = RateLimiter(Limits(key_rpm=2), 1, clock)
    for _ in range(2):
        with limiter.admit(key()):
            pass
    with pytest.raises(TooMany) as caught:
        limiter.admit(key())
    assert (caught.value.status, caught.value.code, caught.value.reason) == (
        429,
        "key_rate_limit_exceeded",
        "key_rate_limit",
    )
    assert caught.value.headers == {"retry-after": "30"}
    with limiter.admit(key("bob")), limiter.admit(key("carol", rpm=0)):
        pass  # others are not held up
    clock.now += 29.0
    with pytest.raises(TooMany) as caught:
        limiter.admit(key())
    assert caught.value.headers == {"retry-after": "1"}
    clock.now += 1.0
    with limiter.admit(key()):
        pass


def test_a_keys_own_limits_come_before_the_defaults() -> None:
    limiter = RateLimiter(Limits(key_concurrency=1, key_rpm=1), 7, Clock())
    with limiter.admit(key(concurrency=2, rpm=100)), limiter.admit(key(concurrency=2, rpm=100)):
        with pytest.raises(TooMany, match="alice has 2 requests under way") as caught:
            limiter.admit(key(concurrency=2, rpm=100))
        assert caught.value.headers == {"retry-after": "7"}
        assert limiter.running_of("alice") == limiter.running == 2
    assert limiter.running_of("alice") == limiter.running == 0
    for _ in range(90):
        with limiter.admit(key(concurrency=2, rpm=100)):
            pass


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    limiter = RateLimiter(Limits(key_concurrency=1, key_rpm=2), 1, clock)
    with limiter.admit(key()):
        for _ in range(5):
            with pytest.raises(TooMany, match="under way"):
                limiter.admit(key())
    with limiter.admit(key()):
        pass  # the second of two


def test_the_server_as_a_whole() -> None:
    limiter = RateLimiter(Limits(concurrency=2), 1)
    with (
        limiter.admit(None),
        limiter.admit(key()),
        pytest.raises(TooMany, match="2 requests are under way, the most this server takes"),
    ):
        limiter.admit(key("bob"))
    with limiter.admit(key("bob")):
        pass


def test_a_block_that_raises_gives_its_place_back() -> None:
    limiter = RateLimiter(Limits(concurrency=1), 1)
    with pytest.raises(ZeroDivisionError), limiter.admit(None):
        raise ZeroDivisionError
    assert limiter.running == 0
