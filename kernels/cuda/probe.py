"""The read probe: what memory gives to a kernel that does nothing but read, measured beside every result that quotes a share of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.jit import KernelSpec

THREADS = 512
BLOCKS_PER_SM = (1, 2, 4)  # which of them reads fastest differs from card to card


def read_all(driver: Driver, data: Array, out: Array, blocks_per_sm: int = 2) -> KernelCall:
    """Read `data`, whole 16-byte words, and add a checksum of its 32-bit words to out [1] uint32."""
    return KernelCall(
        KernelSpec.of("probe.cu", "read_all"),
        (driver.sm_count * blocks_per_sm, 1, 1),
        (THREADS, 1, 1),
        (data, np.uint64(data.nbytes // 16), out),
    )


def read_all_twin(call: KernelCall, args: list[Any]) -> None:
    """Adds x ^ y ^ z ^ w of every 16 bytes."""
    data, n, out = args
    words = data.reshape(-1).view(np.uint32)[: int(n) * 4].reshape(-1, 4)
    out[0] += np.bitwise_xor.reduce(words, axis=1).sum(dtype=np.uint32)


TWINS = {"read_all": read_all_twin}


def representative_specs() -> list[KernelSpec]:
    """The one there is."""
    return [KernelSpec.of("probe.cu", "read_all")]
