"""The memory layout shared by the host and the step's kernels: slots, delta records, token records.

Everything is made of 32-bit words, so that the host's edits are one kind of thing: a *patch* (field, offset, count, words) that the
step's first kernel copies into place. Joining, leaving and growing need no other mechanism.

Delta record, one per step, in a ring of `depth` entries: word 0 the step number (written last), word 1 the number of words that follow, then
patches. Token record, one per step, in a ring of `depth` entries: word 0 the step number (written last), word 1 the number of rows,
then `TOKEN_WORDS` words a row: slot, serial, token, flags. Log-probabilities lie in a ring of their own, `LOGPROB_WORDS` a sample,
complete before the token record is.
Step numbers start at 1: a zeroed ring is empty.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

PAD = -1  # the slot of a padding row: it reads nothing and writes nowhere
MAX_STOP_IDS = 8
MAX_BIAS = 300
MAX_LOGPROBS = 20

SLOT = np.dtype(
    [
        ("seq_len", "<i4"),  # tokens whose KV is in the cache: the position of the next token to be fed
        ("last_token", "<i4"),  # that token
        ("max_len", "<i4"),  # tokens at which the sequence ends, prompt included
        ("state", "<i4"),  # SlotState
        ("serial", "<u4"),  # changes with every request that takes the slot: tells its tokens from a predecessor's
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("seed_lo", "<u4"),
        ("seed_hi", "<u4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("num_stop_ids", "<i4"),
        ("stop_ids", "<i4", (MAX_STOP_IDS,)),
        ("min_len", "<i4"),  # tokens before which no stop id is sampled
        ("prompt_len", "<i4"),
        ("num_bias", "<i4"),
        ("num_logprobs", "<i4"),  # alternatives to report, -1: report nothing
        ("fresh", "<i4"),  # set by the host with a new request: the step clears what a predecessor left behind
        ("spare", "<u4", (4,)),
    ]
)
SLOT_WORDS = SLOT.itemsize // 4
assert SLOT_WORDS == 32, "a slot is one 128-byte line"


class SlotState(IntEnum):
    """FREE slots and DONE ones turn their rows into padding."""

    FREE = 0
    RUNNING = 1
    DONE = 2  # the device found the end; the host has not seen it yet


class Field(IntEnum):
    """What a patch may write."""

    SLOTS = 0  # [slots, SLOT_WORDS]
    BLOCK_TABLE = 1  # [slots, max_blocks] int32
    DECODE_ROWS = 2  # [max_batch] int32: the slot of each decode row
    PREFILL_TOKENS = 3  # [max_rows] int32
    PREFILL_POSITIONS = 4  # [max_rows] int32
    PREFILL_SLOTS = 5  # [max_rows] int32
    PREFILL_SAMPLES = 6  # [max_samples] int32: rows whose logits are wanted, PAD for none
    SCORE_TARGETS = 7  # [max_samples] int32: the token to score at a sampled row of a score step, PAD to sample one
    BIAS_IDS = 8  # [slots, MAX_BIAS] int32
    BIAS_VALUES = 9  # [slots, MAX_BIAS] float32, as bits
    PROMPT_SEEN = 10  # [slots, vocab / 32 rounded up] uint32: a bit for each token of the prompt


PATCH_HEADER = 3  # field, offset, count
RECORD_HEADER = 2  # step, words
TOKEN_WORDS = 4  # slot, serial, token, flags
LOGPROB_WORDS = 2 + 2 * MAX_LOGPROBS  # log-probability (float32 bits), rank, then the top tokens' ids and values


class TokenFlag(IntEnum):
    """How a token leaves its sequence."""

    GOES_ON = 0
    STOP = 1  # a stop id
    LENGTH = 2  # max_len reached
