"""What the server is told at its start."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from graphrt.api.cors import check_origins
from graphrt.api.log_format import LEVELS
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
    bodies_limit: int = 256 << 20  # all bodies that are being read or tokenized, together
    header_limit: int = 64 << 10  # request line and headers together
    header_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    keep_alive_s: int = 75  # longer than the idle time of usual proxies
    retry_after_s: int = 1  # told to a client that met a full queue
    send_timeout_s: float = 30.0  # for a client that stops reading its reply
    request_timeout_s: float = 0.0  # for a request that makes work, from its headers to its end; 0: no limit
    api_key_files: tuple[Path, ...] = ()  # none: everybody is let in
    guard_metrics: bool = False  # whether /metrics needs a key as well
    max_concurrency: int = 0  # requests that make work at once; 0: no limit, as in the next two
    key_concurrency: int = 0
    key_rpm: int = 0  # requests a minute and key
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_level: str = "info"
    log_json: bool = False

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
            ("bodies_limit", self.body_limit, 1 << 40),
            ("header_limit", 1024, 1 << 20),
            ("header_timeout_s", 0.01, 3600),
            ("body_timeout_s", 0.01, 3600),
            ("keep_alive_s", 1, 3600),
            ("retry_after_s", 1, 3600),
            ("send_timeout_s", 0.01, 3600),
            ("request_timeout_s", 0, 86400),
            ("max_concurrency", 0, 1_000_000),
            ("key_concurrency", 0, 1_000_000),
            ("key_rpm", 0, 1_000_000),
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise ConfigError(f"{name} is {value}: must be from {low} to {high}")
        if not self.host:
            raise ConfigError("host is empty: give an address such as 127.0.0.1 or 0.0.0.0")
        if not self.api_key_files and (self.key_concurrency or self.key_rpm or self.guard_metrics):
            raise ConfigError("limits by key, and a key for /metrics, need API keys: give --api-key-file")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        if self.log_level not in LEVELS:
            raise ConfigError(f"log level {self.log_level!r}: must be one of {', '.join(LEVELS)}")
        check_origins(self.cors_origins)
        self.engine.check()
