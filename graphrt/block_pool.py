"""KV blocks: who references them, and which of them hold a known prefix.

A block is free, used (referenced by live sequences), or cached (unreferenced, but its contents are indexed by the hash of everything up
to its last token, until the memory is needed: least recently released first). Hashes are chains of SHA-256 over the model's fingerprint, the
block layout, a salt and the tokens, so two processes agree on them and no seed of Python's matters.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root_hash(fingerprint: bytes, layout: str, salt: str = "") -> bytes:
    """The start of a chain: models, layouts or tenants that differ share nothing."""
    digest = hashlib.sha256(fingerprint)
    for text in (layout, salt):
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block that follows `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class BlockPool:
    """A fixed number of blocks, 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Unreferenced blocks kept for later hits."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that a live sequence references."""
        return self.num_blocks - self.available

    def allocate(self, count: int) -> list[int]:
        """Blocks with one reference each, evicting cached ones as needed. ValueError when there are not enough."""
        free = self._free
        if count > len(free) and count > self.available:
            raise ValueError(f"{count} blocks wanted, {self.available} of {self.num_blocks} available")
        blocks = []
        for _ in range(count):
            if free:
                block = free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a hash chain, each with one more reference."""
        blocks = []
        for h in hashes:
            block = self._block_of.get(h)
            if block is None:
                break
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, h: bytes) -> None:
        """Say that a referenced block's contents are complete. A second block with the same contents stays private."""
        if self._hash_of[block] is None and h not in self._block_of:
            self._hash_of[block] = h
            self._block_of[h] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. The last blocks of a sequence are evicted first: they are the least shared."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released but not referenced")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def _forget(self, block: int) -> None:
        h = self._hash_of[block]
        assert h is not None, "only published blocks are cached"
        del self._block_of[h]
        self._hash_of[block] = None
