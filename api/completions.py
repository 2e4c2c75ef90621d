"""POST /v1/completions: the older interface, which goes on from raw text or tokens."""

from __future__ import annotations

import msgspec

from graphrt.api import params
from graphrt.api.ask import Ask, make_ask
from graphrt.api.choices import Choices
from graphrt.api.completion_reply import CompletionReply
from graphrt.api.deliver import Writer
from graphrt.api.errors import ApiError
from graphrt.api.generate import GenerateEndpoint
from graphrt.api.raw_prompt import RawPrompt, encode_prompts, prompt_count
from graphrt.api.request_schema import CompletionRequest
from graphrt.api.state import AppState
from graphrt.seam.records import NO_LOGPROBS

DEFAULT_TOKENS = 16  # OpenAI's


class CompletionEndpoint(GenerateEndpoint[CompletionRequest]):
    """One or several prompts, `n` replies to each."""

    def __init__(self, state: AppState) -> None:
        super().__init__(state, msgspec.json.Decoder(CompletionRequest))

    async def asks(self, request: CompletionRequest) -> list[Ask]:
        """One a prompt."""
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise ApiError(
                f"best_of is {request.best_of}: replies are not ranked here; leave it out or give n, {request.n or 1}",
                param="best_of",
                code="unsupported_parameter",
            )
        if request.max_tokens == 0 and not request.echo:
            raise ApiError("max_tokens is 0: at least 1, or echo true", param="max_tokens")
        info = self.state.engine.info
        params.choices(request, prompt_count(request.prompt), info.max_batch + info.max_waiting)
        state = self.state
        prompts = await encode_prompts(request.prompt, state.tokenizer, state.encoders, state.room, info.vocab_size)
        return [self._ask(request, prompt) for prompt in prompts]

    def _ask(self, request: CompletionRequest, prompt: RawPrompt) -> Ask:
        scored = params.prompt_logprobs(request)
        logprobs = NO_LOGPROBS if request.logprobs is None else request.logprobs
        if request.echo:
            scored = max(scored, logprobs)
        asked = DEFAULT_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
        context = self.state.engine.info.context
        if request.max_tokens is None:
            asked = max(1, min(asked, context - len(prompt.tokens)))  # a default is no wish
        budget = params.output_budget(asked, "max_tokens", "prompt", len(prompt.tokens), context)
        return make_ask(request, self.state, prompt.tokens, budget, logprobs, scored, prompt.text)

    def writer(self, request: CompletionRequest, choices: Choices, with_usage: bool) -> Writer:
        """Chunks with text, or all of it."""
        return CompletionReply(self.state, request, choices, with_usage)
