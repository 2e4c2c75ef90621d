"""The safetensors format: a strict header reader over a memory map, and a streaming writer.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from graphrt.errors import ModelError

MAX_HEADER = 100 << 20  # bytes; the limit of the reference implementation
READABLE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4}
_WIDTHS |= {"U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}


@dataclass(frozen=True)
class Entry:
    """One tensor: its type as the file spells it, its shape, its bytes [begin, end) counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A memory-mapped file whose header has been checked: `entries` by name, `size` and `header_hash`.

    ModelError when the file is missing, truncated or has bytes left over, or its header is malformed, overlaps or
    leaves gaps.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 8:
                    raise ModelError(f"{path} is truncated: {self.size} bytes are too few for a safetensors file")
                self.map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
        length = int.from_bytes(self.map[:8], "little")
        if length > MAX_HEADER:
            raise ModelError(
                f"{path} is not a safetensors file: header of {length} bytes, at most {MAX_HEADER} allowed"
            )
        if 8 + length > self.size:
            raise ModelError(f"{path} is truncated: header of {length} bytes in a file of {self.size} bytes")
        header = self.map[8 : 8 + length]
        self.header_hash = hashlib.sha256(header).digest()
        self.entries = _parse_header(path, header, 8 + length)
        self._check_layout(8 + length)

    def _check_layout(self, start: int) -> None:
        end, before = start, "the header"
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin < end:
                raise ModelError(f"{self.path}: tensor {name} overlaps {before}")
            if entry.begin > end:
                raise ModelError(
                    f"{self.path}: {entry.begin - end} bytes between {before} and {name} belong to no tensor"
                )
            end, before = entry.end, name
        if end > self.size:
            raise ModelError(f"{self.path} is truncated: its header describes {end} bytes, the file has {self.size}")
        if end < self.size:
            raise ModelError(f"{self.path} has {self.size - end} bytes after its last tensor ({before})")

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only view (a copy only where offsets are misaligned). ModelError on types not in READABLE."""
        entry = self.entries[name]
        dtype = READABLE.get(entry.dtype)
        if dtype is None:
            raise ModelError(
                f"{self.path}: tensor {name} is {entry.dtype}, which is not supported, only {', '.join(READABLE)}"
            )
        count = math.prod(entry.shape)
        if count == 0:
            return np.empty(entry.shape, dtype)
        view = np.frombuffer(self.map, dtype=dtype, count=count, offset=entry.begin).reshape(entry.shape)
        return view if view.flags.aligned else np.require(view, requirements="A")


def _parse_header(path: Path, header: bytes, start: int) -> dict[str, Entry]:
    try:
        pairs = json.loads(header.decode("utf-8"), object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the safetensors header is not valid JSON: {error}") from None
    if not isinstance(pairs, _Pairs):
        raise ModelError(f"{path}: the safetensors header is not a JSON object")
    entries: dict[str, Entry] = {}
    for name, value in pairs:
        if name == "__metadata__":
            continue
        if name in entries:
            raise ModelError(f"{path}: tensor {name} appears twice in the header")
        entries[name] = _parse_entry(path, name, value, start)
    return entries


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its repeated keys kept."""


def _parse_entry(path: Path, name: str, value: Any, start: int) -> Entry:
    fields = dict(value) if isinstance(value, _Pairs) else {}
    dtype, shape, offsets = fields.get("dtype"), _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ModelError(f"{path}: the header's entry for tensor {name} is malformed")
    begin, end = offsets
    if begin > end:
        raise ModelError(f"{path}: tensor {name} has offsets {begin} to {end}")
    width = _WIDTHS.get(dtype)
    if width is not None and math.prod(shape) * width != end - begin:
        raise ModelError(
            f"{path}: tensor {name} of shape {tuple(shape)} in {dtype} takes {math.prod(shape) * width} bytes, "
            f"its offsets give {end - begin}"
        )
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _naturals(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(type(x) is int and x >= 0 for x in value) else None


class SafetensorsWriter:
    """Writes tensors one after another, in the order given, and hashes what it writes.

    `tensors` lists (name, dtype, shape), dtype a key of READABLE. Wider types should come first: that keeps all of them
    aligned. `close` must follow the last `write`.
    """

    def __init__(self, file: BinaryIO, tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]):
        self._file = file
        self._hash = hashlib.sha256()
        self._todo = list(tensors)
        header: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for name, dtype, shape in self._todo:
            begin, end = end, end + math.prod(shape) * READABLE[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 64)
        self.size = 8 + len(text) + end
        self._todo.reverse()
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)

    def write(self, name: str, parts: Iterable[np.ndarray[Any, Any]]) -> None:
        """The next tensor, in consecutive pieces; its name, type and number of elements must be those announced."""
        expected, dtype, shape = self._todo.pop()
        if name != expected:
            raise ValueError(f"{expected} is next, not {name}")
        count = 0
        for part in parts:
            if part.dtype != READABLE[dtype]:
                raise ValueError(f"{name} is announced as {dtype}, not {part.dtype}")
            count += part.size
            self._put(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        if count != math.prod(shape):
            raise ValueError(f"{name} is announced with shape {shape}, {count} elements came")

    def close(self) -> str:
        """Flushes; the SHA-256 of the whole file in hexadecimal."""
        if self._todo:
            raise ValueError(f"{len(self._todo)} tensors are not written")
        self._file.flush()
        return self._hash.hexdigest()
