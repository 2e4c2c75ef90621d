"""The prompt of a completion: texts or token ids, one or several."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from graphrt.api.errors import ApiError
from graphrt.api.ports import TextCodec
from graphrt.api.prompt import encode_texts


@dataclass(frozen=True)
class RawPrompt:
    """`text` is None where token ids were given."""

    tokens: list[int]
    text: str | None


async def encode_prompts(
    prompt: str | list[str | int | list[int]], tokenizer: TextCodec, executor: Executor, vocab_size: int
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
        tokens = await encode_texts(texts, tokenizer, executor, add_special=True)
        prompts = [RawPrompt(ids, text) for ids, text in zip(tokens, texts, strict=True)]
    elif kinds == {int}:
        prompts = [RawPrompt([item for item in items if isinstance(item, int)], None)]
    else:
        prompts = [RawPrompt(item, None) for item in items if isinstance(item, list)]
    for i, each in enumerate(prompts):
        where = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
        if not each.tokens:
            raise ApiError(f"{where} is empty: a completion needs at least one token to go on from", param="prompt")
        if each.text is None:
            check_ids(each.tokens, vocab_size, where, "prompt")
    return prompts


def check_ids(tokens: list[int], vocab_size: int, where: str, param: str) -> None:
    """`ApiError` 400 for the first id outside the vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ApiError(f"{where} holds token id {bad}: the vocabulary is 0 to {vocab_size - 1}", param=param)
