"""A tensor that is a recipe: random values that a backend makes where it wants them, rather than copies there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """Values mean + std · b with b nearly normal, a function of `seed` and the position. Stands where a NumPy array does."""

    shape: tuple[int, ...]
    seed: int
    std: float
    mean: float = 0.0
    dtype: np.dtype[Any] = BF16

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """The values on the host. Not those that a device makes: only their distribution is the same."""
        values = np.random.default_rng(self.seed).standard_normal(self.shape, dtype=np.float32)
        values *= np.float32(self.std)
        values += np.float32(self.mean)
        return values.astype(self.dtype if dtype is None else dtype)

    def astype(self, dtype: DTypeLike, copy: bool = True) -> NDArray[Any]:
        """The values on the host, in another type."""
        return self.__array__(dtype)
