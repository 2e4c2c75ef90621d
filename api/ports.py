"""What the server needs of the engine, the tokenizer and the template: the seams at which tests put their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from graphrt.seam.records import NO_LOGPROBS, EngineInfo, Sampling, Stats, TokenOut


class TokenStream(Protocol):
    """The tokens of one request, ending after the item whose `finish` is set."""

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have `listener` called on the loop when something came; it must then `take` until there is nothing. What is there
        already is not told. None stops it.
        """

    def take(self) -> TokenOut | None:
        """All that came since the last time, None for nothing.

        Raises `RequestError` when the engine refused the request and `EngineDead` when the engine died.
        """

    def cancel(self) -> None:
        """Drop the request in the engine; may be called at any time and more than once."""


class StepTrace(Protocol):
    """One step of the engine: `kind` is "decode", "prefill" or another, `batch` the captured size, `rows` those in use."""

    @property
    def step(self) -> int: ...

    @property
    def kind(self) -> str: ...

    @property
    def batch(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def ms(self) -> float: ...

    @property
    def host_us(self) -> float: ...


@runtime_checkable
class StepLog(Protocol):
    """An engine that remembers its last steps."""

    async def step_log(self, n: int) -> Sequence[StepTrace]:
        """The last `n` steps at most, newest last. Raises `EngineDead`."""


class Engine(Protocol):
    """The server's side of the engine. `submit` raises `EngineDead` once `alive` is False."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> Stats: ...

    @property
    def alive(self) -> bool: ...

    @property
    def death_reason(self) -> str: ...

    def submit(
        self,
        tokens: list[int],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: list[int],
        *,
        min_tokens: int = 0,
        logit_bias: Sequence[tuple[int, float]] = (),
        logprobs: int = NO_LOGPROBS,
        prompt_logprobs: int = NO_LOGPROBS,
    ) -> TokenStream: ...

    async def wait_dead(self) -> None: ...

    async def close(self, drain_timeout_s: float) -> None: ...


class Detokenizer(Protocol):
    """Turns ids into text piece by piece; the pieces together equal the text of all ids.

    `push` is `take` of each id, the bytes that it adds to the text, and then `push_bytes` of them.
    """

    def push(self, ids: Sequence[int]) -> str: ...

    def take(self, token: int) -> bytes: ...

    def push_bytes(self, data: bytes) -> str: ...

    def finish(self) -> str: ...


class TextCodec(Protocol):
    """Text to token ids and back. `encode` may be called from several threads."""

    @property
    def eos_ids(self) -> Collection[int]: ...

    @property
    def longest_token(self) -> int:
        """No token spells more characters."""

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """`add_special` adds what the tokenizer puts around a raw prompt."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """`special` spells the marks that are no text."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, none of a special one."""

    def is_special(self, token: int) -> bool:
        """Whether the token is a mark that is no text."""

    def spelling(self, token: int) -> str:
        """How the vocabulary spells a token."""

    def detokenizer(self) -> Detokenizer: ...


class PromptTemplate(Protocol):
    """Writes a conversation as the one text that the model was trained on. Raises `RequestError`."""

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any) -> str: ...
