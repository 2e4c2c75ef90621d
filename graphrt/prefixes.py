"""Full blocks offered to the prefix index, and found there again.

Hashing a block takes longer than anything else that a token costs the host, and nobody waits for it: blocks are noted when they are full
and published later, before anybody looks for them and before their sequence gives them back.
"""

from __future__ import annotations

from graphrt.block_pool import BlockPool
from graphrt.sequence import Sequence


class Prefixes:
    """The sequences' side of a pool's index. Does nothing unless `enabled`."""

    def __init__(self, pool: BlockPool, block_tokens: int, enabled: bool) -> None:
        self._pool, self._block_tokens, self._enabled = pool, block_tokens, enabled
        self._noted: list[Sequence] = []

    def find(self, seq: Sequence) -> list[int]:
        """The blocks of the longest known beginning that it may take over, referenced."""
        if not self._enabled:
            return []
        seq.extend_hashes(self._block_tokens, len(seq.tokens) - 1)
        return self._pool.match(seq.hashes[: seq.reusable // self._block_tokens])

    def note(self, seq: Sequence) -> None:
        """The blocks within `seq.retired` are complete. It must not give them back before `publish`."""
        if self._enabled:
            self._noted.append(seq)

    def publish(self) -> bool:
        """Offer what was noted; whether that was anything."""
        if not self._noted:
            return False
        for seq in self._noted:
            full = seq.retired // self._block_tokens
            if full > seq.published:
                seq.extend_hashes(self._block_tokens, seq.retired)
                for i in range(seq.published, full):
                    self._pool.publish(seq.blocks[i], seq.hashes[i])
                seq.published = full
        self._noted.clear()
        return True
