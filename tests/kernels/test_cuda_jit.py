"""What cannot become a kernel is an error with its name, however far it came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.core", reason="the compiler's packages are not installed: pip install 'graphrt[jit]'")

from graphrt.errors import DeviceError
from graphrt.kernels.cuda.jit import ARCHES, Jit, KernelSpec

WAYS: dict[str, Callable[[Jit, KernelSpec], Any]] = {
    "alone": lambda jit, spec: jit.kernel(spec),
    "among many": lambda jit, spec: jit.prepare([spec], 2),
}


@pytest.fixture
def jit() -> Jit:
    try:
        return Jit(ARCHES[0])
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("way", WAYS)
def test_a_source_that_does_not_compile(jit: Jit, way: str) -> None:
    spec = KernelSpec.of("rms_norm.cu", "rms_norm", wrong=1)  # without what the source needs
    with pytest.raises(DeviceError, match=r"(?s)kernel rms_norm\(wrong=1\) does not compile for sm_90a: .*undefined"):
        WAYS[way](jit, spec)


class Missing:
    """A module without the entry, as cuda.core reports it: with an exception of its own."""

    def get_kernel(self, name: str) -> None:
        raise RuntimeError("CUDA_ERROR_NOT_FOUND: This indicates that a named symbol was not found.")


@pytest.mark.parametrize("way", WAYS)
def test_an_entry_that_its_source_does_not_have(jit: Jit, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec.of("fill.cu", "nothing", bits=16)
    assert jit.object_code(spec) is not None, "the source compiles: only the driver finds out"
    monkeypatch.setattr(jit, "object_code", lambda spec: Missing())
    with pytest.raises(
        DeviceError, match=r"^kernel nothing\(bits=16\) cannot be loaded from fill\.cu: CUDA_ERROR_NOT_FOUND"
    ):
        WAYS[way](jit, spec)
    assert not jit._kernels
