"""Models for tests: tiny random ones made on the spot, and the default model, fetched once per machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load_sibling(name: str) -> ModuleType:
    # The tests are no package (importlib mode), so a shared helper is loaded by its path.
    spec = importlib.util.spec_from_file_location(f"graphrt_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """The module tests/tiny_models.py, for tests that want its parts."""
    return _load_sibling("tiny_models")


@pytest.fixture(scope="session")
def gguf_models() -> ModuleType:
    """The module tests/gguf_models.py: tiny models as GGUF files."""
    return _load_sibling("gguf_models")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_models: ModuleType) -> Callable[..., Path]:
    """`tiny_model("llama" | "qwen3", **shape) -> Path`; arguments of `write_tiny_model`.

    Equal arguments share one directory within a session: do not write to it.
    """
    made: dict[str, Path] = {}

    def make(architecture: str = "llama", **shape: Any) -> Path:
        key = repr((architecture, sorted(shape.items())))
        if key not in made:
            made[key] = tiny_models.write_tiny_model(
                tmp_path_factory.mktemp(f"tiny-{architecture}"), architecture, **shape
            )
        return made[key]

    return make


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The directory of the default model, fetched when it is not on this machine. Skips without a network."""
    from graphrt.catalog import DEFAULT_MODEL
    from graphrt.errors import ModelError
    from graphrt.paths import find_model
    from graphrt.pull import FetchError, pull

    try:
        return find_model(DEFAULT_MODEL)
    except ModelError:
        pass
    try:
        return pull(DEFAULT_MODEL)
    except FetchError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"the default model cannot be fetched: {error}")
