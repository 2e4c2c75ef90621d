"""What the server tells the engine process on its command line, as one JSON argument."""

from __future__ import annotations

import msgspec

from graphrt.engine_config import EngineConfig
from graphrt.seam.wires import WireFds


class Boot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`runner` is `module:function` or `path/to/file.py:function`, called with (EngineConfig, EngineEndpoint)."""

    config: EngineConfig
    wires: WireFds
    parent_pid: int
    runner: str
