"""What the server is told at its start."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from graphrt.engine_config import EngineConfig
from graphrt.errors import ConfigError


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds, limits in bytes. `port` 0 lets the kernel choose."""

    model_dir: Path
    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None  # None: the name of the directory
    drain_timeout_s: float = 30.0  # given to requests in flight after SIGTERM or Ctrl-C
    death_grace_s: float = 3.0  # how long a server without its engine stays up to say so
    start_timeout_s: float = 900.0  # for the engine to load its model
    body_limit: int = 8 << 20
    header_limit: int = 64 << 10  # request line and headers together
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    keep_alive_s: int = 75  # longer than the idle time of usual proxies
    retry_after_s: int = 1  # told to a client that met a full queue

    @property
    def model_name(self) -> str:
        """The name that requests must give and that replies bear."""
        return self.served_model_name or self.model_dir.resolve().name

    def check(self) -> None:
        """Raise `ConfigError` for a value out of its range."""
        for name, low, high in (
            ("port", 0, 65535),
            ("drain_timeout_s", 0, 86400),
            ("death_grace_s", 0, 3600),
            ("start_timeout_s", 0.001, 86400),
            ("body_limit", 1024, 1 << 30),
            ("header_limit", 1024, 1 << 20),
            ("header_timeout_s", 0.01, 3600),
            ("body_timeout_s", 0.01, 3600),
            ("keep_alive_s", 1, 3600),
            ("retry_after_s", 1, 3600),
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise ConfigError(f"{name} is {value}: must be from {low} to {high}")
        if not self.host:
            raise ConfigError("host is empty: give an address such as 127.0.0.1 or 0.0.0.0")
        self.engine.check()
