"""A strict reader of GGUF files (versions 2 and 3, little-endian): metadata and where each tensor lies."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from graphrt.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_TYPES = {int(t): t for t in GGMLQuantizationType}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the file. `shape` is in NumPy order (rows first); `data` is raw bytes [rows, bytes per row]."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


class GgufFile:
    """`metadata` by key (arrays as lists) and `tensors` by name.

    ModelError when the file is missing, truncated, malformed, of another version or byte order, or when it holds a tensor
    of a type that is unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 24:
                    raise ModelError(f"{path} is truncated: {self.size} bytes are too few for a GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._parse()
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: a string near byte {self._at} is not UTF-8: {error.reason}") from None

    def _parse(self) -> None:
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        version = self._scalar("<I")
        if version & 0xFFFF == 0:
            raise ModelError(f"{self.path} is a big-endian GGUF file, which is not supported")
        if version not in (2, 3):
            raise ModelError(f"{self.path} is of GGUF version {version}, only 2 and 3 are supported")
        tensor_count, key_count = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(key_count):
            key = self._string()
            if key in self.metadata:
                raise ModelError(f"{self.path}: key {key} appears twice")
            self.metadata[key] = self._value(self._scalar("<I"), key)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}, expected a power of two")
        start = -(-self._at // alignment) * alignment
        for name, shape, type_id, offset in infos:
            if name in self.tensors:
                raise ModelError(f"{self.path}: tensor {name} appears twice")
            self.tensors[name] = self._tensor(name, shape, type_id, start + offset)

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self.size:
            raise ModelError(f"{self.path} is truncated: {end} bytes are needed for its header, it has {self.size}")
        data = self._map[self._at : end]
        self._at = end
        return data

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("<Q")).decode("utf-8")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: key {key} has a value of unknown type {kind}")
        inner, count = self._scalar("<I"), self._scalar("<Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            return np.frombuffer(self._take(count * struct.calcsize(code)), code).tolist()
        if inner != _STRING:
            raise ModelError(f"{self.path}: key {key} is an array of unsupported type {inner}")
        return [self._string() for _ in range(count)]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._scalar("<I")
        if not 1 <= dims <= 4:
            raise ModelError(f"{self.path}: tensor {name} has {dims} dimensions, expected 1 to 4")
        shape = struct.unpack(f"<{dims}Q", self._take(8 * dims))
        return name, tuple(reversed(shape)), self._scalar("<I"), self._scalar("<Q")

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, begin: int) -> GgufTensor:
        kind = _TYPES.get(type_id)
        if kind is None:
            raise ModelError(f"{self.path}: tensor {name} is of unknown type {type_id}")
        block, width = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelError(f"{self.path}: tensor {name} has rows of {shape[-1]} in {kind.name}, in blocks of {block}")
        rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * width
        end = begin + rows * row_bytes
        if end > self.size:
            raise ModelError(f"{self.path} is truncated: tensor {name} ends at byte {end}, the file has {self.size}")
        data = np.frombuffer(self._map, np.uint8, rows * row_bytes, begin).reshape(rows, row_bytes)
        return GgufTensor(name, kind.name, shape, data)
