"""The requests that generate text, field by field, as types: msgspec checks shape and range while it decodes.

Unknown fields are ignored. `None` and absence mean the same everywhere. The descriptions are those of the API's pages.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from graphrt.seam.records import MAX_BIAS, MAX_LOGPROBS

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 64
MAX_N = 128
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
# What the code checks by itself, with clearer words than msgspec's, told to the readers of the API's pages.
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})]
StopText = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_STOP_CHARS})]
Bias = Annotated[float, Meta(extra_json_schema={"minimum": -100, "maximum": 100})]
_BIASES = {"propertyNames": {"pattern": "^[0-9]{1,10}$"}}
_ONLY_TEXT = {"properties": {"type": {"const": "text"}}, "required": ["type"]}
_NO_CHOICE = {"enum": ["none", "auto", None]}
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(msgspec.Struct):
    """How a streamed reply is to look."""

    include_usage: Annotated[bool | None, Meta(description="send the usage in a last chunk without choices")] = None


class ContentPart(msgspec.Struct):
    """One part of a message; only `type` "text" is served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What every endpoint that generates text takes."""

    model: Annotated[str, Meta(description="the name that /v1/models lists")]
    max_tokens: Annotated[int, Meta(ge=1, description="most tokens of the reply")] | None = None
    min_tokens: (
        Annotated[int, Meta(ge=0, description="tokens before which nothing but the length ends a reply")] | None
    ) = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0, description="0 always takes the likeliest token")] | None = None
    top_p: (
        Annotated[float, Meta(ge=0.0, le=1.0, description="sample from the smallest set of this probability")] | None
    ) = None
    top_k: Annotated[int, Meta(ge=-1, description="sample from this many likeliest tokens; -1 and 0: all")] | None = (
        None
    )
    min_p: (
        Annotated[float, Meta(ge=0.0, le=1.0, description="drop tokens less likely than this share of the best")] | None
    ) = None
    seed: Annotated[Seed, Meta(description="the same gives the same reply, whatever else is served")] | None = None
    n: (
        Annotated[int, Meta(ge=1, le=MAX_N, description="replies to each prompt; the first uses the seed as it is")]
        | None
    ) = None
    stop: (
        StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS, description="texts that end a reply")] | None
    ) = None
    stop_token_ids: (
        Annotated[list[int], Meta(max_length=MAX_STOP_TOKENS, description="tokens that end a reply")] | None
    ) = None
    include_stop_str_in_output: Annotated[bool, Meta(description="keep the text that ended the reply")] | None = None
    ignore_eos: Annotated[bool, Meta(description="go on past the model's own end tokens")] | None = None
    presence_penalty: (
        Annotated[Penalty, Meta(description="taken once from the logits of tokens already in the reply")] | None
    ) = None
    frequency_penalty: (
        Annotated[Penalty, Meta(description="taken for each time that a token is in the reply")] | None
    ) = None
    repetition_penalty: (
        Annotated[float, Meta(ge=0.001, le=1000.0, description="weakens tokens of prompt and reply above 1")] | None
    ) = None
    logit_bias: (
        Annotated[
            dict[str, Bias],
            Meta(
                max_length=MAX_BIAS,
                description="token id to a number from -100 to 100 added to its logit; -100 bans it",
                extra_json_schema=_BIASES,
            ),
        ]
        | None
    ) = None
    prompt_logprobs: (
        Annotated[
            Logprobs, Meta(description="likeliest tokens to show at each place of the prompt; not when streaming")
        ]
        | None
    ) = None
    stream: Annotated[bool, Meta(description="send the reply as server-sent events while it grows")] | None = None
    stream_options: StreamOptions | None = None
    response_format: (
        Annotated[dict[str, Any], Meta(description='only {"type": "text"} so far', extra_json_schema=_ONLY_TEXT)] | None
    ) = None
    # Taken and without effect here: user, metadata, store, service_tier, like any unknown field.


class ChatRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, description="the newer name of max_tokens")] | None = None
    logprobs: Annotated[bool, Meta(description="show the log-probability of each token")] | None = None
    top_logprobs: Annotated[Logprobs, Meta(description="likeliest tokens to show beside it; needs logprobs")] | None = (
        None
    )
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="options of the model's chat template")] | None = (
        None
    )
    add_generation_prompt: (
        Annotated[bool, Meta(description="open the assistant's turn; true unless continued")] | None
    ) = None
    continue_final_message: Annotated[bool, Meta(description="go on with the last message's own text")] | None = None
    tools: Annotated[list[Any], Meta(description="none so far", extra_json_schema={"maxItems": 0})] | None = None
    tool_choice: Annotated[Any, Meta(extra_json_schema=_NO_CHOICE)] = None
    functions: Annotated[list[Any], Meta(description="none so far", extra_json_schema={"maxItems": 0})] | None = None
    function_call: Annotated[Any, Meta(extra_json_schema=_NO_CHOICE)] = None
    modalities: (
        Annotated[list[str], Meta(description='only ["text"]', extra_json_schema={"const": ["text"]})] | None
    ) = None


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="a text, a list of texts, token ids, or a list of lists of token ids"),
    ]
    max_tokens: (
        Annotated[int, Meta(ge=0, description="most tokens of the reply, 16 if absent; 0 only with echo")] | None
    ) = None
    echo: Annotated[bool, Meta(description="put the prompt before the reply")] | None = None
    logprobs: Annotated[Logprobs, Meta(description="likeliest tokens to show beside each token's own")] | None = None
    suffix: Annotated[str, Meta(description="only empty", extra_json_schema={"maxLength": 0})] | None = None
    best_of: Annotated[int, Meta(description="only n")] | None = None
