"""What the engine refuses to start: the last wall before arrays of fixed size are indexed with what came from outside."""

from __future__ import annotations

import math

from graphrt.errors import RequestError
from graphrt.seam.records import MAX_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, NO_LOGPROBS, EngineInfo, Submit


def check_submit(r: Submit, info: EngineInfo) -> None:
    """RequestError with the field's name, its value and the limit."""
    if not r.tokens:
        raise RequestError("the prompt is empty", param="prompt")
    _within("max_tokens", r.max_tokens, 1, info.context)
    if len(r.tokens) + r.max_tokens > info.context:
        raise RequestError(
            f"prompt of {len(r.tokens)} tokens and max_tokens {r.max_tokens} exceed the context of {info.context} tokens",
            param="max_tokens",
        )
    _tokens("prompt", r.tokens, info.vocab_size)
    _within("min_tokens", r.min_tokens, 0, r.max_tokens)
    if len(r.stop_ids) > MAX_STOP_IDS:
        raise RequestError(f"{len(r.stop_ids)} stop ids: at most {MAX_STOP_IDS}", param="stop_token_ids")
    if r.stop_ids:
        _tokens("stop_token_ids", r.stop_ids, info.vocab_size)
    if len(r.logit_bias) > MAX_BIAS:
        raise RequestError(f"logit_bias has {len(r.logit_bias)} entries: at most {MAX_BIAS}", param="logit_bias")
    if r.logit_bias:
        _tokens("logit_bias", [t for t, _ in r.logit_bias], info.vocab_size)
        for _, value in r.logit_bias:
            if not (-1e6 <= value <= 1e6 or value == -math.inf):  # also refuses NaN
                raise RequestError(f"logit_bias holds {value}: must be from -1e6 to 1e6, or -inf", param="logit_bias")
    _within("logprobs", r.logprobs, NO_LOGPROBS, MAX_LOGPROBS)
    _within("prompt_logprobs", r.prompt_logprobs, NO_LOGPROBS, MAX_LOGPROBS)
    s = r.sampling
    _within("temperature", s.temperature, 0, 1e6)
    _within("top_k", s.top_k, 0, 2**31 - 1)
    _within("top_p", s.top_p, 0, 1)
    _within("min_p", s.min_p, 0, 1)
    _within("seed", s.seed, 0, 2**64 - 1)
    _within("repetition_penalty", s.repetition_penalty, 1e-3, 1e3)
    _within("presence_penalty", s.presence_penalty, -100, 100)
    _within("frequency_penalty", s.frequency_penalty, -100, 100)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise RequestError(f"{name} is {value}: must be from {low} to {high}", param=name)


def _tokens(name: str, tokens: list[int], vocab: int) -> None:
    if not 0 <= min(tokens) <= max(tokens) < vocab:
        bad = next(t for t in tokens if not 0 <= t < vocab)
        raise RequestError(f"{name} holds token id {bad}: the vocabulary is 0 to {vocab - 1}", param=name)
