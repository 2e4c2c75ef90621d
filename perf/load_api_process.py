"""The server under load as a child process: start it, read its numbers, end it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphrt.perf.quiet import OtherLoad

_TICKS = os.sysconf("SC_CLK_TCK")
_LINE = re.compile(r"^(graphrt:\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class ServerProcess:
    """`with ServerProcess(...) as server:`. Its engine is a child of its own, `engine_pid`."""

    def __init__(self, engine: dict[str, Any], cpu: int | None = None) -> None:
        """`engine` are the fields of `ClockSettings`; `cpu` pins the server."""
        command = [sys.executable, "-m", "graphrt.perf.load_api_server", json.dumps(engine)]
        pin = [] if cpu is None else [str(cpu)]
        self._child = subprocess.Popen(command + pin, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if found is None:
            self._child.kill()
            raise RuntimeError(f"the server did not start: {line!r}")
        self.port = int(found[1])
        self.pid = self._child.pid
        [child] = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        self.engine_pid = int(child)

    def cpu_s(self) -> float:
        """CPU time of the server so far, its engine not included."""
        return cpu_seconds(self.pid)

    def rss_bytes(self) -> int:
        """Its resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def counts(self, metric: str, label: str) -> dict[str, int]:
        """One counter of /metrics by one of its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as reply:
            page = reply.read().decode()
        out: dict[str, int] = {}
        for name, labels, value in _LINE.findall(page):
            if name == f"graphrt:{metric}":
                key = dict(_LABEL.findall(labels)).get(label, "")
                out[key] = out.get(key, 0) + int(float(value))
        return out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Foreign:
    """Cores that programs other than this process, its children that have ended, and `pids` use since it was made."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._others = OtherLoad(os.getpid())
        self._start = self._ours_s(), time.perf_counter()

    def _ours_s(self) -> float:
        times = os.times()
        return times.children_user + times.children_system + sum(map(cpu_seconds, self._pids))

    def cores(self) -> float:
        ours_s, start = self._start
        return self._others.cores() - (self._ours_s() - ours_s) / (time.perf_counter() - start)
