"""Prompts that cannot fit the model's context are refused before any work goes into them: a megabyte takes seconds to tokenize."""

from __future__ import annotations

from graphrt.api.errors import ApiError


class PromptRoom:
    """`context` in tokens; no token spells more than `longest` characters."""

    def __init__(self, context: int, longest: int) -> None:
        self._context = context
        self._longest = longest

    def check_text(self, text: str, param: str, where: str | None = None) -> None:
        """`ApiError` 400 for a text that no tokens of the context could spell."""
        if len(text) > self._context * self._longest:
            self._refuse(param, where or param, f"{len(text)} characters")

    def check_count(self, count: int, what: str, param: str, where: str | None = None) -> None:
        """The same for a number of things, `what`, of which each takes a token at least."""
        if count > self._context:
            self._refuse(param, where or param, f"{count} {what}")

    def _refuse(self, param: str, where: str, size: str) -> None:
        raise ApiError(
            f"this model's context is {self._context} tokens, prompt and reply together: {where} has {size} and cannot fit",
            param=param,
            code="context_length_exceeded",
        )
