"""`driver`: a GPU, where there is one, and the fake one everywhere. Each test runs on both, from the same inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphrt.doctor.driver import probe
from graphrt.kernels.cuda.driver import Driver
from graphrt.kernels.cuda.fake_driver import FakeDriver


@pytest.fixture(scope="session")
def cuda_driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The GPU. Skips, saying why, where there is none."""
    found = probe()
    if not found.fits:
        pytest.skip(f"no GPU: {found.problem}")
    from graphrt.kernels.cuda.cuda_driver import CudaDriver

    return CudaDriver(cache_dir=Path(tmp_path_factory.getbasetemp()) / "kernels")


@pytest.fixture(params=["cuda", "fake"])
def driver(request: pytest.FixtureRequest) -> Driver:
    """Both kinds of device."""
    made: Driver = request.getfixturevalue("cuda_driver") if request.param == "cuda" else FakeDriver()
    return made
