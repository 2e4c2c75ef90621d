"""The prompt of a completion: texts or token ids, one or several."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.api.encoders import Encoders
from graphrt.api.errors import ApiError
from graphrt.api.ports import TextCodec
from graphrt.api.prompt_room import PromptRoom

Prompt = str | list[str | int | list[int]]


@dataclass(frozen=True)
class RawPrompt:
    """`text` is None where token ids were given."""

    tokens: list[int]
    text: str | None


def prompt_count(prompt: Prompt) -> int:
    """How many prompts there are: a list of numbers is one."""
    return 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)


async def encode_prompts(
    prompt: Prompt, tokenizer: TextCodec, encoders: Encoders, room: PromptRoom, vocab_size: int
) -> list[RawPrompt]:
    """All prompts, texts with what the tokenizer puts around them. `ApiError` 400 names the item that does not fit."""
    items = [prompt] if isinstance(prompt, str) else prompt
    if not items:
        raise ApiError("prompt is an empty list", param="prompt")
    kinds = {type(item) for item in items}
    if len(kinds) > 1:
        raise ApiError("prompt mixes texts and token ids: give a list of one kind", param="prompt")
    if kinds == {str}:
        texts = [item for item in items if isinstance(item, str)]
        for i, text in enumerate(texts):
            room.check_text(text, "prompt", _where(i, len(texts)))
        prompts = [
            RawPrompt(tokens, text)
            for tokens, text in zip(await encode_texts(texts, tokenizer, encoders, True), texts, strict=True)
        ]
    elif kinds == {int}:
        prompts = [RawPrompt([item for item in items if isinstance(item, int)], None)]
    else:
        prompts = [RawPrompt(item, None) for item in items if isinstance(item, list)]
    for i, each in enumerate(prompts):
        where = _where(i, len(prompts))
        if not each.tokens:
            raise ApiError(f"{where} is empty: a completion needs at least one token to go on from", param="prompt")
        if each.text is None:
            room.check_count(len(each.tokens), "tokens", "prompt", where)
            check_ids(each.tokens, vocab_size, where, "prompt")
    return prompts


async def encode_texts(
    texts: list[str], tokenizer: TextCodec, encoders: Encoders, add_special: bool
) -> list[list[int]]:
    """The token ids of raw texts."""
    return await encoders.run(
        sum(map(len, texts)), lambda: [tokenizer.encode(text, add_special=add_special) for text in texts]
    )


def _where(index: int, count: int) -> str:
    return "prompt" if count == 1 else f"prompt[{index}]"


def check_ids(tokens: list[int], vocab_size: int, where: str, param: str) -> None:
    """`ApiError` 400 for the first id outside the vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ApiError(f"{where} holds token id {bad}: the vocabulary is 0 to {vocab_size - 1}", param=param)
