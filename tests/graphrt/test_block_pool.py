"""Blocks: references, the prefix index, eviction."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from graphrt.block_pool import BlockPool, block_hash, root_hash


def chain(root: bytes, tokens: list[int], size: int = 4) -> list[bytes]:
    out = []
    for i in range(0, len(tokens) - size + 1, size):
        root = block_hash(root, tokens[i : i + size])
        out.append(root)
    return out


ROOT = root_hash(b"model", "layout")


def test_hashes_depend_on_all_that_goes_before() -> None:
    a, b = chain(ROOT, [1, 2, 3, 4, 5, 6, 7, 8]), chain(ROOT, [9, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0] and a[1] != b[1]
    roots = {ROOT, root_hash(b"other", "layout"), root_hash(b"model", "x"), root_hash(b"model", "layout", "salt")}
    assert len(roots) == 4
    assert root_hash(b"m", "ab", "c") != root_hash(b"m", "a", "bc")


def test_hashes_are_the_same_in_another_process() -> None:
    code = "from graphrt.block_pool import *; print(block_hash(root_hash(b'model', 'layout'), [1, 2, 70000]).hex())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert runs == {block_hash(ROOT, [1, 2, 70000]).hex()}


def test_a_prefix_is_found_shared_and_kept() -> None:
    pool = BlockPool(4)
    hashes = chain(ROOT, list(range(12)))
    mine = pool.allocate(3)
    for block, h in zip(mine, hashes, strict=True):
        pool.publish(block, h)
    assert pool.match(hashes[:2]) == mine[:2]
    pool.release(mine)
    assert (pool.used, pool.cached, pool.available) == (2, 1, 2)
    pool.release(mine[:2])
    assert (pool.used, pool.cached, pool.available) == (0, 3, 4)
    assert pool.match([*hashes, b"unknown"]) == mine
    assert pool.used == 3


def test_the_tail_of_the_oldest_chain_is_evicted_first() -> None:
    pool = BlockPool(3)
    hashes = chain(ROOT, list(range(12)))
    blocks = pool.allocate(3)
    for block, h in zip(blocks, hashes, strict=True):
        pool.publish(block, h)
    pool.release(blocks)
    (taken,) = pool.allocate(1)
    assert taken == blocks[2]
    assert pool.match(hashes) == blocks[:2]


def test_equal_contents_computed_twice_stay_private() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.publish(a, b"h" * 32)
    pool.publish(b, b"h" * 32)
    pool.release([b])
    assert pool.cached == 0
    pool.release([a])
    assert pool.cached == 1 and pool.match([b"h" * 32]) == [a]


def test_more_than_there_is_and_double_release_are_errors() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 of 2 available"):
        pool.allocate(3)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="not referenced"):
        pool.release(blocks[:1])


def test_random_use_keeps_the_books() -> None:
    rng = np.random.default_rng()
    pool, held = BlockPool(32), []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.integers(len(held))))
        else:
            hashes = chain(ROOT, rng.integers(0, 2, 4 * rng.integers(1, 4)).tolist())
            blocks = pool.match(hashes)
            need = len(hashes) - len(blocks)
            if need > pool.available:
                pool.release(blocks)
                continue
            blocks = blocks + pool.allocate(need)
            assert len(set(blocks)) == len(blocks)
            for block, h in zip(blocks, hashes, strict=True):
                pool.publish(block, h)
            held.append(blocks)
        assert pool.used == len({b for bs in held for b in bs})
        assert pool.used + pool.available == 32
