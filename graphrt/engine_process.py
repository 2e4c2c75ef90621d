"""Entry of the engine process: `python -m graphrt.engine_process BOOT_JSON`, started by `EngineClient.launch` only."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from graphrt.engine_config import EngineConfig
from graphrt.errors import ConfigError
from graphrt.seam.boot import Boot
from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.guard import run_guarded

Runner = Callable[[EngineConfig, EngineEndpoint], None]

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Run the engine that `argv[0]` (JSON of `Boot`) describes; returns the exit code.

    SIGINT is ignored (the server handles Ctrl-C and drains), SIGTERM sets `endpoint.terminate_requested`, and the
    kernel kills the process when the server dies, however busy the engine is.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by the server until here
    faulthandler.enable()
    boot = msgspec.json.decode(argv[0], type=Boot)
    _die_with(boot.parent_pid)
    endpoint = EngineEndpoint(boot.wires)

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        endpoint.request_terminate()

    signal.signal(signal.SIGTERM, on_sigterm)

    def run(endpoint: EngineEndpoint) -> None:
        load_runner(boot.runner)(boot.config, endpoint)

    return run_guarded(run, endpoint)


def load_runner(name: str) -> Runner:
    """The function that `module:function` or `file.py:function` names. `ConfigError` if there is none."""
    where, _, attribute = name.rpartition(":")
    module: Any
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location("graphrt_runner", where)
        if spec is None or spec.loader is None or not os.path.exists(where):
            raise ConfigError(f"engine runner {name!r}: no such file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["graphrt_runner"] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    runner: Runner | None = getattr(module, attribute, None)
    if runner is None:
        raise ConfigError(f"engine runner {name!r}: {where} has no {attribute}")
    return runner


def _die_with(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the kernel was told
        raise SystemExit("the server is gone")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code:
        # Not through the interpreter's end: what is freed there would wait for a device that hangs.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)
