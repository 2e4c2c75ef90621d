"""The weights of a model directory: memory-mapped safetensors, one file or shards with an index."""

from __future__ import annotations

import difflib
import hashlib
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from graphrt.errors import ModelError
from graphrt.jsonfile import Fields, read_json
from graphrt.memory import check_memory
from graphrt.safetensors_file import SafetensorsFile

__all__ = ["Checkpoint", "Tensors", "check_memory", "open_checkpoint", "verify_checkpoint"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
RECORD = "graphrt.json"  # where the files came from and their hashes, written by conversion
_SAMPLE = 256  # bytes


class Tensors(Protocol):
    """Where a model's weights come from."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        """A tensor of this shape. ModelError when there is none."""

    def fingerprint(self) -> bytes:
        """32 bytes that differ where weights do."""


class Checkpoint:
    """Tensors by name, as views into memory maps: nothing is read before it is touched. Made by `open_checkpoint`."""

    def __init__(self, model_dir: Path, files: list[SafetensorsFile]) -> None:
        self.model_dir = model_dir
        self.files = files
        self._home: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.entries:
                if name in self._home:
                    raise ModelError(f"tensor {name} is in both {self._home[name].path} and {file.path}")
                self._home[name] = file

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._home)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(e.end - e.begin for f in self.files for e in f.entries.values())

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape. ModelError when there is no such tensor."""
        return self._file_of(name).entries[name].shape

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """A read-only array of float32, float16 or ml_dtypes.bfloat16, without a copy.

        ModelError when it is missing, its shape is not `shape`, or it is of another type.
        """
        file = self._file_of(name)
        have = file.entries[name].shape
        if have != tuple(shape):
            raise ModelError(f"{file.path}: tensor {name} has shape {have}, the configuration wants {tuple(shape)}")
        return file.array(name)

    def unused(self, used: Iterable[str]) -> list[str]:
        """Names that are stored but not in `used`, sorted."""
        return sorted(self._home.keys() - set(used))

    def fingerprint(self) -> bytes:
        """32 bytes that tell models apart: configuration, headers, sizes and three samples of every tensor."""
        digest = hashlib.sha256()
        config = self.model_dir / "config.json"
        digest.update(config.read_bytes() if config.is_file() else b"")
        for file in self.files:
            digest.update(file.size.to_bytes(8, "little") + file.header_hash)
            for entry in file.entries.values():
                middle = (entry.begin + entry.end) // 2
                for begin in (entry.begin, middle, entry.end - _SAMPLE):
                    begin = max(begin, entry.begin)
                    digest.update(file.map[begin : min(begin + _SAMPLE, entry.end)])
        return digest.digest()

    def _file_of(self, name: str) -> SafetensorsFile:
        file = self._home.get(name)
        if file is None:
            near = difflib.get_close_matches(name, self._home, n=3, cutoff=0.7)
            hint = f"; near names: {', '.join(near)}" if near else ""
            raise ModelError(f"{self.model_dir}: tensor {name} is missing{hint}")
        return file


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names, and checks every header."""
    model_dir = Path(model_dir)
    single, index = model_dir / SINGLE, model_dir / INDEX
    if single.exists():
        _check_recorded_size(model_dir)
        return Checkpoint(model_dir, [SafetensorsFile(single)])
    if index.exists():
        return _open_shards(model_dir, index)
    others = sorted(p.name for p in model_dir.glob("*") if p.suffix in (".safetensors", ".bin", ".gguf", ".pth"))
    hint = f" (found {', '.join(others[:4])})" if others else ""
    raise ModelError(f"{model_dir} has neither {SINGLE} nor {INDEX}{hint}")


def _open_shards(model_dir: Path, index: Path) -> Checkpoint:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(v, str) for v in mapping.values()):
        raise ModelError(f"{index} has no weight_map of tensor names to file names")
    shards: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(mapping.values())):
        if Path(shard).name != shard:
            raise ModelError(f"{index}: {shard!r} is not a plain file name")
        if not (model_dir / shard).exists():
            raise ModelError(f"{index} names {shard}, which is missing")
        shards[shard] = SafetensorsFile(model_dir / shard)
    for name, shard in mapping.items():
        if name not in shards[shard].entries:
            raise ModelError(f"{index} places tensor {name} in {shard}, which does not hold it")
    return Checkpoint(model_dir, list(shards.values()))


def _recorded(model_dir: Path) -> dict[str, Fields]:
    path = model_dir / RECORD
    files = Fields(read_json(path), str(path)).section("files") if path.is_file() else None
    if files is None:
        return {}
    sections = {name: files.section(name) for name in files.values if Path(name).name == name}
    return {name: section for name, section in sections.items() if section is not None}


def _check_recorded_size(model_dir: Path) -> None:
    record = _recorded(model_dir).get(SINGLE)
    if record is None:
        return
    size, want = (model_dir / SINGLE).stat().st_size, record.integer("size", 0, 1 << 62)
    if size != want:
        raise ModelError(f"{model_dir / SINGLE} has {size} bytes, {RECORD} records {want}: {_again(model_dir)}")


def _again(model_dir: Path) -> str:
    # What is there is never fetched over.
    return f"remove the directory (rm -r {shlex.quote(str(model_dir))}), then fetch the model again (graphrt pull)"


def verify_checkpoint(model_dir: Path, progress: Callable[[int], None] | None = None) -> list[str]:
    """Hashes every file that `graphrt.json` records; the names checked, empty where nothing is recorded.

    `progress` is called with the number of bytes just hashed. ModelError on a missing file or another hash.
    """
    checked = []
    for name, record in _recorded(model_dir).items():
        path = model_dir / name
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
                    if progress:
                        progress(len(chunk))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
        want = record.string("sha256")
        if digest.hexdigest() != want:
            raise ModelError(f"{path} has SHA-256 {digest.hexdigest()}, {RECORD} records {want}: {_again(model_dir)}")
        checked.append(name)
    return checked
