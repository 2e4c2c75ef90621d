"""From the fields of a request to what the engine is asked for. Everything here raises `ApiError` 400 by field name."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from graphrt.api.defaults import SamplingDefaults
from graphrt.api.errors import ApiError
from graphrt.api.request_schema import MAX_STOP_CHARS, GenerationFields
from graphrt.seam.records import MAX_STOP_IDS, Sampling

GREEDY_BELOW = 1e-5  # dividing logits by less overflows float32


def sampling_of(request: GenerationFields, defaults: SamplingDefaults) -> Sampling:
    """How tokens are to be chosen. Without a seed one is drawn, so that no two requests share their noise."""
    temperature = defaults.temperature if request.temperature is None else request.temperature
    top_p = defaults.top_p if request.top_p is None else request.top_p
    top_k = defaults.top_k if request.top_k is None else request.top_k
    min_p = defaults.min_p if request.min_p is None else request.min_p
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
    )


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
    """The tokens that end the reply: the model's own end tokens unless `ignore_eos`, and the request's."""
    asked = request.stop_token_ids or []
    for token in asked:
        if not 0 <= token < vocab_size:
            raise ApiError(
                f"stop_token_ids holds {token}: the vocabulary is 0 to {vocab_size - 1}", param="stop_token_ids"
            )
    ids = list(dict.fromkeys([*(() if request.ignore_eos else sorted(eos_ids)), *asked]))
    if len(ids) > MAX_STOP_IDS:
        raise ApiError(
            f"stop_token_ids and the model's end tokens are {len(ids)} together: at most {MAX_STOP_IDS} are allowed",
            param="stop_token_ids",
        )
    return ids


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
