"""One request on its way through the engine: tokens, progress, the slot and blocks that it holds."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field

from graphrt.block_pool import block_hash
from graphrt.capture.delta import SLOT_STRUCT, DeltaWriter
from graphrt.kernels.abi import MAX_BIAS, MAX_STOP_IDS, Field, SlotState
from graphrt.seam.records import NO_LOGPROBS, Submit

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt and output together. Lengths count tokens.

    computed: tokens whose KV is in the cache, or will be once the launched steps retire; while it has a row, `DecodeRows.computed` says it.
    retired: the same for steps that have retired, as of the last block that they filled: what may be published.
    lead, due: while it has a row, what to add to the number of decode steps for `computed`, and at which number it needs attention.
    """

    request: Submit
    tokens: list[int]
    max_len: int
    root: bytes
    serial: int = 0
    slot: int = NO_SLOT
    key: int = 0  # slot and serial, as a token record has them
    row: int = -1  # its decode row
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as known
    published: int = 0  # leading blocks offered to the prefix index
    prefill_end: int = 0  # tokens to compute before it decodes
    computed: int = 0
    retired: int = 0
    lead: int = 0
    due: int = 0
    last_step: int = 0  # the last launched one that it took part in, as of when it got or lost its row
    cached_tokens: int = 0  # of the first admission
    admitted_before: bool = False
    finish: str = ""
    scored: int = 0  # of the prompt's tokens 1, 2, ...
    arrived: float = field(default_factory=time.monotonic)
    id: int = field(init=False)
    reports: bool = field(init=False)  # log-probabilities of its tokens

    def __post_init__(self) -> None:
        self.id, self.reports = self.request.id, self.request.logprobs != NO_LOGPROBS

    @property
    def prompt_len(self) -> int:
        return len(self.request.tokens)

    @property
    def scoring(self) -> bool:
        """Whether its next prompt rows need logits."""
        return self.request.prompt_logprobs != NO_LOGPROBS and self.scored < self.prompt_len - 1

    @property
    def reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache: nothing that a row has to be computed for."""
        if self.scoring:
            return 0
        s = self.request.sampling
        counted = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        # At least one token is computed: it gives the logits. Output is counted when its row passes.
        return min(len(self.tokens) - 1, self.prompt_len if counted else len(self.tokens))

    def extend_hashes(self, block_tokens: int, length: int) -> None:
        """Know the hashes of the full blocks among the first `length` tokens."""
        parent = self.hashes[-1] if self.hashes else self.root
        for i in range(len(self.hashes), length // block_tokens):
            parent = block_hash(parent, self.tokens[i * block_tokens : (i + 1) * block_tokens])
            self.hashes.append(parent)

    def install(self, delta: DeltaWriter, vocab: int) -> None:
        """Write all that its slot needs to know, but for the blocks."""
        r, s = self.request, self.request.sampling
        self.key = self.slot | self.serial << 32
        reported = max(r.logprobs, r.prompt_logprobs)
        packed = SLOT_STRUCT.pack(
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
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            len(r.stop_ids),
            *r.stop_ids,
            *([0] * (MAX_STOP_IDS - len(r.stop_ids))),
            self.prompt_len + r.min_tokens,
            self.prompt_len,
            len(r.logit_bias),
            reported,
            1,
            *([0] * 4),
        )
        delta.patch_slot(self.slot, packed)
        if r.logit_bias:
            values = struct.pack(f"{len(r.logit_bias)}f", *(v for _, v in r.logit_bias))
            delta.patch(Field.BIAS_IDS, self.slot * MAX_BIAS, [t for t, _ in r.logit_bias])
            delta.patch(Field.BIAS_VALUES, self.slot * MAX_BIAS, memoryview(values).cast("i").tolist())
        if s.repetition_penalty != 1:
            words = [0] * (-(-vocab // 32))
            for token in set(r.tokens):
                words[token >> 5] |= 1 << (token & 31)
            signed = memoryview(struct.pack(f"<{len(words)}I", *words)).cast("i").tolist()
            delta.patch(Field.PROMPT_SEEN, self.slot * len(words), signed)
