"""The engine as a child process: start it, see it die at once, keep the end of what it wrote to stderr."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from graphrt.engine_config import EngineConfig
from graphrt.seam.boot import Boot
from graphrt.seam.wires import WireFds

_TAIL_BYTES = 8192
_TAIL_LINES = 20


class EngineProcess:
    """A running engine. `on_exit(reason)` is called once, on the loop, after the process was reaped.

    Its stdout and stderr come out on this process's stderr, or go piece by piece to `on_output`. It is killed by the
    kernel when the *thread* that made this object ends, so make it on the event loop's own thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: str,
        fds: WireFds,
        loop: asyncio.AbstractEventLoop,
        on_exit: Callable[[str], None],
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        boot = Boot(config, fds, os.getpid(), runner)
        self._loop = loop
        self._on_exit = on_exit
        self._on_output = on_output or _to_stderr
        self._tail = bytearray()
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._pidfd = -1
        self._output, child_output = os.pipe()
        os.set_blocking(self._output, False)
        try:
            # Ctrl-C goes to the whole terminal group; the child inherits the block and lifts it once it ignores SIGINT.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._child = subprocess.Popen(
                    [sys.executable, *_safe_path(), "-m", "graphrt.engine_process", msgspec.json.encode(boot).decode()],
                    stdin=subprocess.DEVNULL,
                    stdout=child_output,
                    stderr=child_output,
                    pass_fds=fds.all(),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(child_output)
        self.pid = self._child.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._child.kill()
            self._child.wait()
            os.close(self._output)
            raise
        loop.add_reader(self._pidfd, self._exited)
        loop.add_reader(self._output, self._forward)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it (SIGKILL)."""
        self._child.send_signal(signal.SIGKILL)

    def stderr_tail(self) -> str:
        """The last lines that it wrote, without the final line end."""
        lines = self._tail.decode(errors="replace").rstrip().splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def release(self) -> None:
        """Close the descriptors and stop watching. Idempotent."""
        for fd in (self._pidfd, self._output):
            if fd >= 0:
                self._loop.remove_reader(fd)
                os.close(fd)
        self._pidfd = self._output = -1

    def _exited(self) -> None:
        code = self._child.wait()  # the pidfd is readable: it is a zombie already, so this reaps without waiting
        self._forward()
        self.release()
        self._on_exit(self._reason(code))

    def _reason(self, code: int) -> str:
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            return f"engine process {self.pid} was killed by {name}"
        return f"engine process {self.pid} exited with code {code}"

    def _forward(self) -> None:
        """Pass on what it wrote. It must be read even when nobody looks, or the engine would block on a full pipe."""
        while self._output >= 0:
            try:
                data = os.read(self._output, 65536)
            except BlockingIOError:
                return
            self._tail += data
            del self._tail[:-_TAIL_BYTES]
            if not data:  # closed by the child, which may well live on
                self._loop.remove_reader(self._output)
                os.close(self._output)
                self._output = -1
            self._on_output(self._text.decode(data, final=not data))


def _to_stderr(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _safe_path() -> list[str]:
    """`-m` puts the working directory first on the path, where a stray `numpy.py` would shadow; a checkout needs it."""
    return [] if Path.cwd() == Path(__file__).resolve().parents[2] else ["-P"]
