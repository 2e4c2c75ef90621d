"""From the fields of a request to what the engine is asked for. Everything here raises `ApiError` 400 by field name."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Collection

from graphrt.api.defaults import SamplingDefaults
from graphrt.api.errors import ApiError
from graphrt.api.request_schema import MAX_STOP_CHARS, GenerationFields
from graphrt.seam.records import NO_LOGPROBS, Sampling

GREEDY_BELOW = 1e-5  # dividing logits by less overflows float32


def sampling_of(request: GenerationFields, defaults: SamplingDefaults) -> Sampling:
    """How tokens are to be chosen. Without a seed one is drawn, so that no two requests share their noise."""
    temperature = defaults.temperature if request.temperature is None else request.temperature
    top_p = defaults.top_p if request.top_p is None else request.top_p
    top_k = defaults.top_k if request.top_k is None else request.top_k
    min_p = defaults.min_p if request.min_p is None else request.min_p
    repetition = request.repetition_penalty
    if top_k >= 2**31:
        raise ApiError(f"top_k is {top_k}: must be below {2**31}", param="top_k")
    if top_p == 0.0:
        top_p, top_k = 1.0, 1  # the smallest nucleus is the most likely token
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=max(0, top_k),
        top_p=top_p,
        min_p=min_p,
        seed=_seed(request.seed),
        repetition_penalty=defaults.repetition_penalty if repetition is None else repetition,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
    )


def choice_seed(seed: int, index: int) -> int:
    """The seed of one of several replies to a prompt; the first has the request's own."""
    if index == 0:
        return seed
    digest = hashlib.sha256(seed.to_bytes(8, "little") + index.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(64)
    if not -(2**63) <= seed < 2**64:
        raise ApiError(f"seed is {seed}: must fit 64 bits", param="seed")
    return seed % 2**64


def stop_strings(request: GenerationFields) -> tuple[str, ...]:
    """The texts that end the reply, without doubles."""
    if request.stop is None:
        return ()
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    for stop in stops:
        if not stop:
            raise ApiError("stop holds an empty string: it would end every reply at once", param="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise ApiError(
                f"stop holds a string of {len(stop)} characters: at most {MAX_STOP_CHARS} are allowed", param="stop"
            )
    return tuple(dict.fromkeys(stops))


def stop_ids(request: GenerationFields, eos_ids: Collection[int], vocab_size: int) -> list[int]:
    """The tokens that end the reply: the request's, then the model's own end tokens unless `ignore_eos`.

    The engine takes the first `MAX_STOP_IDS` of them; the others are found in its output.
    """
    asked = request.stop_token_ids or []
    for token in asked:
        if not 0 <= token < vocab_size:
            raise ApiError(
                f"stop_token_ids holds {token}: the vocabulary is 0 to {vocab_size - 1}", param="stop_token_ids"
            )
    return list(dict.fromkeys([*asked, *(() if request.ignore_eos else sorted(eos_ids))]))


def logit_bias(request: GenerationFields, vocab_size: int) -> list[tuple[int, float]]:
    """Tokens and what is added to their logits; -100 and less, the API's least, is a ban."""
    out: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else -1
        if not 0 <= token < vocab_size:
            shown = key if len(key) <= 40 else key[:37] + "..."
            raise ApiError(
                f"logit_bias holds {shown!r}: must be a token id from 0 to {vocab_size - 1}", param="logit_bias"
            )
        if not -100.0 <= value <= 100.0:
            raise ApiError(f"logit_bias of token {token} is {value}: must be from -100 to 100", param="logit_bias")
        out[token] = -math.inf if value <= -100.0 else value
    return list(out.items())


def chat_logprobs(logprobs: bool | None, top: int | None) -> int:
    """How many likeliest tokens the engine is to report."""
    if logprobs:
        return top or 0
    if top:
        raise ApiError(f"top_logprobs is {top}: it needs logprobs true", param="top_logprobs")
    return NO_LOGPROBS


def min_tokens(request: GenerationFields, budget: int) -> int:
    """Tokens that a reply of at most `budget` has at least."""
    asked = request.min_tokens or 0
    if asked > budget:
        raise ApiError(f"min_tokens is {asked}: the reply has at most {budget} tokens", param="min_tokens")
    return asked


def prompt_logprobs(request: GenerationFields) -> int:
    """How many likeliest tokens to report at each place of the prompt."""
    if request.prompt_logprobs is None:
        return NO_LOGPROBS
    if request.stream:
        raise ApiError("prompt_logprobs is not available with stream true", param="prompt_logprobs")
    return request.prompt_logprobs


def choices(request: GenerationFields, prompts: int, room: int) -> int:
    """How many replies each prompt gets; all of them must fit in the engine with its queue, which takes `room`."""
    n = request.n or 1
    if n * prompts > room:
        what = f"n is {n}" if prompts == 1 else f"n is {n} for {prompts} prompts"
        raise ApiError(f"{what}: this server takes at most {room} sequences at once", param="n")
    return n


def output_budget(asked: int | None, field: str, prompt: str, prompt_tokens: int, context: int) -> int:
    """Most tokens the reply may have: `asked`, or all the room that the prompt leaves.

    `field` and `prompt` are the names of the request's fields for the error.
    """
    room = context - prompt_tokens
    if room < 1:
        raise ApiError(
            f"this model's context is {context} tokens, prompt and reply together: "
            f"the {prompt} take {prompt_tokens} and leave no room",
            param=prompt,
            code="context_length_exceeded",
        )
    if asked is not None and asked > room:
        raise ApiError(
            f"this model's context is {context} tokens, prompt and reply together: the {prompt} take {prompt_tokens} "
            f"and {field} asks for {asked}, at most {room} are left",
            param=field,
            code="context_length_exceeded",
        )
    return room if asked is None else asked
