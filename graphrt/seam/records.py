"""The records that cross the seam. Token ids only: the engine knows no text and no JSON.

All records are `array_like` msgspec structs encoded with MessagePack, told apart by their tag.
"""

from __future__ import annotations

import msgspec

from graphrt.kernels.abi import MAX_BIAS as MAX_BIAS  # this and the next two: a request
from graphrt.kernels.abi import MAX_LOGPROBS as MAX_LOGPROBS
from graphrt.kernels.abi import MAX_STOP_IDS as MAX_STOP_IDS

NO_LOGPROBS = -1
QUEUE_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing.

    `seed` is an unsigned 64-bit integer: the noise of a token is a function of (seed, absolute position, token id) alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0  # on tokens of prompt and output, as in CTRL (arXiv 1909.05858)
    presence_penalty: float = 0.0  # subtracted once from tokens of the output
    frequency_penalty: float = 0.0  # subtracted once for each occurrence in the output


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A request. `id` is chosen by the server and unique among its live requests; `max_tokens` >= 1."""

    id: int
    tokens: list[int]
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int]  # the token that ends the sequence is reported, with finish "stop"
    min_tokens: int = 0  # stop ids cannot be sampled before this many tokens
    logit_bias: list[tuple[int, float]] = []  # (token, added to its logit); at most MAX_BIAS; -inf bans the token
    logprobs: int = NO_LOGPROBS  # alternatives to report beside each token's own log-probability, at most MAX_LOGPROBS
    prompt_logprobs: int = NO_LOGPROBS  # the same for the prompt's tokens


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Drop a request, wherever it is; answered by a last `TokenOut` with finish "cancelled". Unknown ids are ignored."""

    id: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Take no new requests, finish those in hand for at most `timeout_s` seconds, then end the engine."""

    timeout_s: float


class AskSteps(msgspec.Struct, frozen=True, array_like=True, tag="ask_steps"):
    """Answered by a `StepLog` of at most `count` steps."""

    count: int


class StepTrace(msgspec.Struct, frozen=True, array_like=True):
    """One step that has retired."""

    step: int
    kind: str  # decode, prefill or score
    batch: int  # rows of the graph
    rows: int  # of these, not padding
    ms: float  # in the launch and waiting for the step
    host_us: float  # the engine loop's own time


class StepLog(msgspec.Struct, frozen=True, array_like=True, tag="step_log"):
    """Recent steps, newest last."""

    steps: list[StepTrace]


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities under the model's own distribution: before penalties, bias, temperature and filters.

    `rank` counts from 1. `top` holds the likeliest tokens, best first, as many as were asked for.
    """

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, none where it only scores its prompt.

    `finish` is "" while it goes on, else "stop", "length", "cancelled" or "error".
    """

    id: int
    tokens: list[int]
    finish: str = ""
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache; final after the first token
    logprobs: list[Logprob] = []  # one a token, where asked for
    prompt_logprobs: list[Logprob] = []  # as they are computed, before the first token: of prompt tokens 1, 2, ...


class Output(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """All that one step produced: `tokens[i]` is the next token of request `ids[i]`, of which there is no more to say, and of all
    others there is an item."""

    items: list[TokenOut]
    ids: list[int] = []
    tokens: list[int] = []


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A submit that was not taken: `status` is the HTTP status that fits (429 for a full queue, 400, 503 while draining)."""

    id: int
    status: int
    message: str
    param: str = ""


class EngineInfo(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """What the engine serves; the first record it sends."""

    architecture: str
    device: str
    vocab_size: int
    context: int  # most tokens a sequence may have, prompt and output together
    max_batch: int
    max_waiting: int
    block_tokens: int
    num_blocks: int
    run_ahead: int
    pid: int = 0


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine cannot start or go on; its process ends after this."""

    message: str


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Counters since start and gauges of now. Sent at most ten times a second and when the engine falls idle."""

    running: int = 0
    waiting: int = 0
    slots_used: int = 0
    blocks_total: int = 0
    blocks_used: int = 0  # referenced by a live request
    blocks_cached: int = 0  # unreferenced but kept for prefix hits
    decode_steps: int = 0
    prefill_steps: int = 0
    eager_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of these, found
    preemptions: int = 0
    finished: dict[str, int] = {}  # by finish reason
    step_ms_p50: float = 0.0
    step_ms_p99: float = 0.0
    host_us_p50: float = 0.0  # engine CPU time outside waits and the step itself, per step
    host_us_p99: float = 0.0
    idle_us_p50: float = 0.0  # between a step's last kernel and the next one's first, on the device's clock
    idle_us_p99: float = 0.0
    queue_counts: list[int] = []  # of waits for a slot, by QUEUE_BOUNDS_S; the last is of longer ones
    queue_sum_s: float = 0.0


ToEngine = Submit | Cancel | Drain | AskSteps
FromEngine = EngineInfo | Output | Refused | Stats | StepLog | Fatal
