"""The device's arena: addresses repeat, a dry pass sizes it, frames give back."""

from __future__ import annotations

import numpy as np
import pytest

from graphrt.errors import DeviceError
from graphrt.kernels.array import Array
from graphrt.kernels.cuda.arena import ALIGN, DeviceArena
from graphrt.kernels.cuda.fake_driver import FakeDriver


def step(arena: DeviceArena, rows: int) -> list[Array]:
    arena.reset()
    taken = [arena.take((rows, 100)), arena.take((rows, 3, 7), np.uint8)]
    for _ in range(3):
        with arena.frame():
            taken.append(arena.take((rows, 50)))
    return [*taken, arena.take((rows,), np.int32)]


def test_a_dry_pass_sizes_the_block_once() -> None:
    driver = FakeDriver(twins={})
    arena = DeviceArena(driver)
    with arena.dry():
        places = {rows: step(arena, rows) for rows in (1, 40, 8)}
    assert driver.allocations == 1
    block = arena.block
    assert block is not None
    for rows in (8, 40, 1, 40):
        real = step(arena, rows)
        for a, b in zip(places[rows], real, strict=True):
            assert (a.shape, a.dtype, a.strides) == (b.shape, b.dtype, b.strides)
            assert a.ptr - ALIGN == b.ptr - block.ptr and b.ptr % ALIGN == 0
            driver.memory.view(b, "a temporary")  # lies inside the block
    assert driver.allocations == 1 and arena.grown == 0
    with arena.dry():
        step(arena, 40)
    assert driver.allocations == 1, "a smaller pass keeps the block"


def test_frames_alias_and_neighbours_do_not() -> None:
    arena = DeviceArena(FakeDriver(twins={}))
    first, second, a, b, c, last = step(arena, 5)
    assert a.ptr == b.ptr == c.ptr == last.ptr
    assert first.ptr + first.nbytes <= second.ptr and second.ptr + second.nbytes <= a.ptr


def test_growth_is_counted_and_impossible_inside_a_capture() -> None:
    driver = FakeDriver(twins={})
    arena = DeviceArena(driver)
    step(arena, 1)
    assert arena.grown == 1
    with pytest.raises(DeviceError, match="inside a capture"):
        driver.capture(lambda: step(arena, 10_000))  # type: ignore[arg-type,return-value]
