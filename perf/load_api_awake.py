"""Keeps cores from sleeping: a loop on each that gives way to anything else.

An idle core of a virtual machine is given back to the host, and its next wake-up takes 30 to 50 us, some of them hundreds. That is
the machine's price for idling and not the server's: with these loops it is not paid, as on a machine that has work to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self


class Awake:
    """`with Awake(cores) as awake:`; `pids` are its processes."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus = cpus
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def __enter__(self) -> Self:
        for cpu in self._cpus:
            self._children.append(subprocess.Popen([sys.executable, "-m", "graphrt.perf.load_api_awake", str(cpu)]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.kill()
            child.wait()


def main(argv: list[str]) -> int:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {int(argv[1])})
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(100_000):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
