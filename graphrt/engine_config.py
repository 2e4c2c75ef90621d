"""What the engine process is told at its start; travels as JSON on its command line."""

from __future__ import annotations

import msgspec

from graphrt.errors import ConfigError

MAX_BATCH_LIMIT = 256


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All sizes are fixed at start, because buffers and graphs are. `None` means: choose from model and machine."""

    model_dir: str
    device: str = "cpu"
    max_batch: int = 8  # sequences decoded together
    context: int | None = None  # tokens a sequence may have; None: the model's, if its KV fits
    max_waiting: int = 256  # requests queued beyond those running
    kv_bytes: int | None = None  # memory for KV blocks
    prefill_chunk: int | None = None  # most prompt tokens in one step; None: what suits the device
    block_tokens: int = 16
    threads: int | None = None
    load_format: str = "auto"  # auto: the directory's weights; dummy: random ones, of which config.json gives the shape
    run_ahead: int | None = None  # replays queued before the last one's tokens are read; None: what suits the device

    def check(self) -> None:
        """Raise `ConfigError` for a value out of its range."""
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is unknown: cpu or cuda")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format {self.load_format!r} is unknown: auto or dummy")
        for name, value, low, high in (
            ("max_batch", self.max_batch, 1, MAX_BATCH_LIMIT),
            ("max_waiting", self.max_waiting, 0, 1_000_000),
            ("prefill_chunk", self.prefill_chunk, 1, 65536),
            ("block_tokens", self.block_tokens, 1, 1024),
            ("context", self.context, 1, 1 << 30),
            ("kv_bytes", self.kv_bytes, 1, 1 << 50),
            ("threads", self.threads, 1, 1024),
            ("run_ahead", self.run_ahead, 0, 2),
        ):
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} is {value}: must be from {low} to {high}")
        if self.block_tokens & (self.block_tokens - 1):
            raise ConfigError(f"block_tokens is {self.block_tokens}: must be a power of two")
