"""Directories that appear whole or not at all, made by one process at a time."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphrt.errors import ModelError


@contextmanager
def lock_for(target: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds an exclusive lock beside `target`. The kernel drops it with the process, however that ends.

    `on_wait` is called once when another process holds it. Leaves no file behind.
    """
    path = target.with_name(f".{target.name}.graphrt-lock")
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait:
                    on_wait()
                fcntl.flock(fd, fcntl.LOCK_EX)
            # The holder before removed the file: then this is a lock on a name that nobody else will open.
            if _same_file(fd, path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields a temporary directory beside `target`, renamed to it when the block ends well, removed otherwise.

    Must run under `lock_for(target)`: whatever an earlier, killed process left for this target is removed first.
    Files are on disk before the name is. ModelError when `target` has come to hold something.
    """
    prefix = f".{target.name}.graphrt-partial-"
    for stale in target.parent.glob(glob.escape(prefix) + "*"):
        _remove(stale)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield work
        work.chmod(0o755)
        for path in sorted(work.rglob("*")):
            _sync(path)
        _sync(work)
        try:
            work.rename(target)
        except OSError as error:
            raise ModelError(f"{target} cannot be put in place: {error.strerror}") from None
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def sweep(folder: Path) -> None:
    """Removes what killed processes left in `folder`, of any target that nobody is making now."""
    for work in folder.glob(".*.graphrt-partial-*"):
        target = folder / work.name[1:].rpartition(".graphrt-partial-")[0]
        with suppress(BlockingIOError), lock_for(target, _give_up):
            _remove(work)


def _remove(folder: Path) -> None:
    # A child of the killed process may still be dying, and write one more file while we delete.
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _give_up() -> None:
    raise BlockingIOError


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
