"""The engine as a thread of this process, behind the same rings: for tests and debugging, not for speed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

from graphrt.seam.endpoint import EngineEndpoint
from graphrt.seam.guard import run_guarded
from graphrt.seam.wires import ServerWires


class EngineThread:
    """A running engine. `on_exit(reason)` is called once, on the loop, after the thread's function returned."""

    def __init__(
        self,
        run: Callable[[EngineEndpoint], None],
        wires: ServerWires,
        loop: asyncio.AbstractEventLoop,
        on_exit: Callable[[str], None],
    ) -> None:
        self.pid = os.getpid()
        self._wires = wires
        self._loop = loop
        self._on_exit = on_exit
        self._endpoint = EngineEndpoint(wires.engine_fds.duplicate())
        self._thread = threading.Thread(target=self._main, args=(run,), name="graphrt-engine", daemon=True)
        self._thread.start()

    def terminate(self) -> None:
        """Ask it to end: sets `terminate_requested`."""
        if self._thread.is_alive():
            self._endpoint.request_terminate()

    def kill(self) -> None:
        """A thread cannot be killed: make the server look gone, which every engine must obey."""
        self._wires.hang_up()

    def stderr_tail(self) -> str:
        """Nothing: a thread writes to this process's own stderr."""
        return ""

    def release(self) -> None:
        """Close the endpoint, if the thread has ended; one that has not goes on using it."""
        if not self._thread.is_alive():
            self._endpoint.close()

    def _main(self, run: Callable[[EngineEndpoint], None]) -> None:
        reason = "engine thread ended"
        try:
            if run_guarded(run, self._endpoint) != 0:
                reason = "engine thread failed"
        except SystemExit:
            pass
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                self._loop.call_soon_threadsafe(self._exited, reason)

    def _exited(self, reason: str) -> None:
        self._thread.join()
        self.release()
        self._on_exit(reason)
