"""One request on its way through the engine: tokens, progress, the slot and blocks that it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphrt.block_pool import block_hash
from graphrt.capture.delta import SLOT_STRUCT
from graphrt.kernels.abi import MAX_STOP_IDS, SlotState
from graphrt.seam.records import Submit

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt and output together. Lengths count tokens.

    computed: tokens whose KV is in the cache, or will be once the launched steps retire.
    retired: the same for steps that have retired: what may be published.
    """

    request: Submit
    tokens: list[int]
    max_len: int
    root: bytes
    serial: int = 0
    slot: int = NO_SLOT
    row: int = -1  # its decode row
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as known
    published: int = 0  # leading blocks offered to the prefix index
    prefill_end: int = 0  # tokens to compute before it decodes
    computed: int = 0
    retired: int = 0
    in_flight: int = 0  # launched steps that have not retired
    cached_tokens: int = 0  # of the first admission
    admitted_before: bool = False
    finish: str = ""

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are still to be launched."""
        return self.computed < self.prefill_end

    def extend_hashes(self, block_tokens: int, length: int) -> None:
        """Know the hashes of the full blocks among the first `length` tokens."""
        parent = self.hashes[-1] if self.hashes else self.root
        for i in range(len(self.hashes), length // block_tokens):
            parent = block_hash(parent, self.tokens[i * block_tokens : (i + 1) * block_tokens])
            self.hashes.append(parent)

    def pack_slot(self) -> bytes:
        """The slot state that its first step installs."""
        s, stops = self.request.sampling, self.request.stop_ids
        return SLOT_STRUCT.pack(
            self.computed,
            0,
            self.max_len,
            SlotState.RUNNING,
            self.serial,
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.seed & 0xFFFFFFFF,
            s.seed >> 32,
            1.0,  # repetition, presence and frequency penalties: not asked for
            0.0,
            0.0,
            len(stops),
            *stops,
            *([0] * (MAX_STOP_IDS - len(stops) + 9)),
        )
