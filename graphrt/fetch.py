"""What the ways of fetching share: the error for a failed network, progress bars, room on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from graphrt.errors import ModelError


class FetchError(ModelError):
    """The source could not be reached or did not deliver; nothing is wrong with the request itself."""


@contextmanager
def bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes; yields a function that takes the number done so far. On a terminal only."""
    columns = (
        *(TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def check_disk(folder: Path, need: int, what: str) -> None:
    """ModelError when the file system of `folder` has less than `need` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(
            f"not enough disk space in {folder}: {what} needs {need / 1e6:.0f} MB, {free / 1e6:.0f} MB are free"
        )
