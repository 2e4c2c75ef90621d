"""What every compiled kernel shares: the disk cache's stamp and the shape of a kernel body.

numba's disk cache notices an edit of the file that holds a function, but not of the files whose helpers were compiled into
it. So each cached function closes over `source_stamp()`; numba makes closed-over values part of the cache's key.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba.extending
import numpy as np
from numba import types

# A kernel body: (control block's address, thread index); it takes work items until none is left.
BODY = types.void(types.int64, types.int64)

# Types of the entry functions' arguments. They are given in full, so nothing is compiled behind a caller's back. What is only
# read is declared read-only: numba then takes writable arrays as well as read-only ones, such as mapped files.
WORD = types.int64
REAL = types.float64

F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
I64 = np.dtype(np.int64)
U16 = np.dtype(np.uint16)
U8 = np.dtype(np.uint8)


def reads(dtype: np.dtype, axes: int) -> types.Array:
    """The type of a C-contiguous argument that a kernel only reads."""
    return types.Array(types.Float("float32") if dtype == F32 else types.Integer(dtype.name), axes, "C", readonly=True)


def writes(dtype: np.dtype, axes: int) -> types.Array:
    """The type of a C-contiguous argument that a kernel writes."""
    return reads(dtype, axes).copy(readonly=False)


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's decorator for functions that emit LLVM IR; typed here by what it makes, a function of the remaining arguments."""
    return numba.extending.intrinsic(function)


def external(name: str, result: Any, *arguments: Any) -> Any:
    """A C function of the process, callable from compiled code."""
    return types.ExternalFunction(name, result(*arguments))


@cache
def source_stamp() -> int:
    """A positive number that changes when any file of this package changes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "big") | 1


def check(name: str, array: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `array` is C-contiguous with exactly this dtype and shape."""
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else ", not C-contiguous"
        raise ValueError(f"{name}: want {dtype} {list(shape)}, have {array.dtype} {list(array.shape)}{order}")
