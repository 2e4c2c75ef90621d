"""What a request asks of the engine for each of its prompts, and how one reply to it is begun."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from graphrt.api import params
from graphrt.api.generation import Generation
from graphrt.api.output_text import OutputText
from graphrt.api.request_note import RequestNote
from graphrt.api.request_schema import GenerationFields
from graphrt.api.state import AppState
from graphrt.errors import EngineDead
from graphrt.seam.records import MAX_STOP_IDS, NO_LOGPROBS, Sampling


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One prompt and how to go on from it. Its replies differ in their seed alone."""

    tokens: list[int]
    sampling: Sampling
    budget: int  # most tokens of a reply
    stops: tuple[str, ...]
    stop_ids: list[int]
    include_stop: bool
    min_tokens: int
    logit_bias: list[tuple[int, float]]
    logprobs: int
    prompt_logprobs: int
    text: str | None  # what the tokens were made of, where that was a text


def make_ask(
    request: GenerationFields,
    state: AppState,
    tokens: list[int],
    budget: int,
    logprobs: int,
    prompt_logprobs: int,
    text: str | None = None,
) -> Ask:
    """The fields that all endpoints share, checked. `ApiError` 400."""
    vocab = state.engine.info.vocab_size
    return Ask(
        tokens=tokens,
        sampling=params.sampling_of(request, state.defaults),
        budget=budget,
        stops=params.stop_strings(request),
        stop_ids=params.stop_ids(request, state.tokenizer.eos_ids, vocab),
        include_stop=request.include_stop_str_in_output or False,
        min_tokens=params.min_tokens(request, budget),
        logit_bias=params.logit_bias(request, vocab),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        text=text,
    )


def begin(ask: Ask, choice: int, state: AppState, note: RequestNote, started: float) -> Generation:
    """Hand one reply to the engine. The prompt's log-probabilities come with the first alone."""
    sampling = ask.sampling
    if choice:
        sampling = msgspec.structs.replace(sampling, seed=params.choice_seed(sampling.seed, choice))
    try:
        stream = state.engine.submit(
            ask.tokens,
            sampling,
            ask.budget,
            ask.stop_ids[:MAX_STOP_IDS],
            min_tokens=ask.min_tokens,
            logit_bias=ask.logit_bias,
            logprobs=ask.logprobs,
            prompt_logprobs=NO_LOGPROBS if choice else ask.prompt_logprobs,
        )
    except EngineDead:
        state.check_serving()
        raise
    text = OutputText(
        state.tokenizer.detokenizer(),
        ask.stops,
        ask.stop_ids[:MAX_STOP_IDS],
        late_ids=ask.stop_ids[MAX_STOP_IDS:],
        include_stop=ask.include_stop,
        min_tokens=ask.min_tokens,
        with_logprobs=ask.logprobs != NO_LOGPROBS,
    )
    return Generation(stream, text, len(ask.tokens), state.metrics, state.live, started, note)
