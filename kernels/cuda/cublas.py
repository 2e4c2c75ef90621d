"""The library's matrix product, for the long rows of a prefill: cuBLAS through its C interface.

The one clever thing: the workspace is given once and the stream is never set again. cuBLAS forgets a workspace whenever a stream is set,
and with none it would allocate inside a capture; that is why no Python binding of it, which sets the stream at every call, will do.
"""

from __future__ import annotations

import ctypes
from typing import Any

from graphrt.errors import DeviceError
from graphrt.kernels.array import Array

WORKSPACE = 32 << 20  # bytes: what cuBLAS itself takes on Hopper and later
PIP = "pip install 'graphrt[cuda]'"

_TRANSPOSE, _PLAIN = 1, 0  # cublasOperation_t
_BF16, _F32 = 14, 0  # cudaDataType
_COMPUTE_F32, _DEFAULT_ALGORITHM = 68, -1


class Cublas:
    """One handle on one stream."""

    def __init__(self, stream: int, workspace: Array) -> None:
        """stream: its handle; workspace: device memory that products on it use. DeviceError when the library is missing."""
        self._lib = _load()
        self._workspace = workspace
        handle = ctypes.c_void_p()
        self._check("cublasCreate_v2", ctypes.byref(handle))
        self._handle = handle
        self._check("cublasSetStream_v2", handle, ctypes.c_void_p(stream))
        self._check("cublasSetWorkspace_v2", handle, ctypes.c_void_p(workspace.ptr), ctypes.c_size_t(workspace.nbytes))
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def matmul(self, x: Array, w: Array, out: Array, accumulate: bool) -> None:
        """out[R, n] float32 (+)= x[R, k] bf16 · w[n, k]ᵀ bf16, float32 sums. Rows may be strided."""
        rows, k = x.shape
        n = w.shape[0]
        if w.shape != (n, k) or out.shape != (rows, n) or (x.dtype.itemsize, out.dtype.itemsize) != (2, 4):
            raise DeviceError(f"matmul: x {x.shape}, w {w.shape} and out {out.shape} do not fit together")
        # Row-major out is column-major outᵀ[n, R] = w · xᵀ, and a row-major w is a transposed column-major one.
        self._check(
            "cublasGemmEx",
            self._handle,
            _TRANSPOSE,
            _PLAIN,
            n,
            rows,
            k,
            ctypes.byref(self._one),
            ctypes.c_void_p(w.ptr),
            _BF16,
            w.strides[0] // 2,
            ctypes.c_void_p(x.ptr),
            _BF16,
            x.strides[0] // 2,
            ctypes.byref(self._one if accumulate else self._zero),
            ctypes.c_void_p(out.ptr),
            _F32,
            out.strides[0] // 4,
            _COMPUTE_F32,
            _DEFAULT_ALGORITHM,
        )

    def _check(self, name: str, *args: Any) -> None:
        status = getattr(self._lib, name)(*args)
        if status:
            raise DeviceError(f"{name}: cuBLAS status {status}")


def _load() -> ctypes.CDLL:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cublas").abs_path
        return ctypes.CDLL(str(path))
    except Exception as error:  # a package, a library or one of the libraries that it needs is missing
        raise DeviceError(f"prefill on a GPU needs cuBLAS ({str(error).splitlines()[0]}): {PIP}") from error
