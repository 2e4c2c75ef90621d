"""One request through an engine process of its own, timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrt.api.output_text import OutputText
from graphrt.engine_config import EngineConfig
from graphrt.errors import GraphrtError
from graphrt.seam.client import EngineClient
from graphrt.seam.records import Sampling
from graphrt.tokenizer import Tokenizer

_START_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Request:
    """What to generate; all sizes in tokens."""

    model_dir: Path
    tokens: list[int]
    max_tokens: int
    stop_ids: list[int]
    sampling: Sampling
    device: str = "cpu"


@dataclass(frozen=True)
class Reply:
    """What came back. `first_s` from submitting to the first token, `total_s` to the last, both without loading."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    load_s: float
    first_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first by the time they took; 0 for a single token."""
        took = self.total_s - self.first_s
        return (self.completion_tokens - 1) / took if self.completion_tokens > 1 and took > 0 else 0.0

    def summary(self) -> str:
        """One line for people."""
        speed = f", {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else ""
        return (
            f"{self.completion_tokens} tokens{speed}; first token after {self.first_s:.2f} s "
            f"({self.prompt_tokens} prompt tokens); loaded in {self.load_s:.1f} s"
        )

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "text": self.text,
            "finish_reason": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "load_s": round(self.load_s, 4),
            "first_token_s": round(self.first_s, 4),
            "total_s": round(self.total_s, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
        }


async def reply(request: Request, tokenizer: Tokenizer, show: Callable[[str], None]) -> Reply:
    """Start an engine for this one request, pass the text to `show` as it comes, end the engine. Raises `GraphrtError`."""
    started = time.perf_counter()
    config = EngineConfig(
        model_dir=str(request.model_dir),
        device=request.device,
        max_batch=1,
        context=len(request.tokens) + request.max_tokens,
    )
    client = await EngineClient.launch(config, start_timeout_s=_START_TIMEOUT_S)
    try:
        submitted = time.perf_counter()
        output = OutputText(tokenizer.detokenizer(), (), request.stop_ids)
        pieces = []
        first = last = submitted
        stream = client.submit(request.tokens, request.sampling, request.max_tokens, request.stop_ids)
        async for item in stream:
            last = time.perf_counter()
            if first == submitted:
                first = last
            pieces.append(output.push(item.tokens, item.finish))
            show(pieces[-1])
        if not output.finish:
            raise GraphrtError(f"the engine gave the reply up after {output.tokens} tokens")
    finally:
        await client.close()
    return Reply(
        text="".join(pieces),
        finish=output.finish,
        prompt_tokens=len(request.tokens),
        completion_tokens=output.tokens,
        load_s=submitted - started,
        first_s=first - submitted,
        total_s=last - submitted,
    )
