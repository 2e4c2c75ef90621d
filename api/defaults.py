"""Sampling defaults that a model brings along in its generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphrt.jsonfile import Fields, read_json


@dataclass(frozen=True)
class SamplingDefaults:
    """Used where a request is silent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """The defaults of the model in `model_dir`; plain sampling where it has none. ModelError for values out of range."""
    path = model_dir / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    fields = Fields(read_json(path), str(path))
    return SamplingDefaults(
        temperature=fields.number("temperature", 0.0, 100.0, 1.0),
        top_p=fields.number("top_p", 0.0, 1.0, 1.0),
        top_k=max(0, fields.integer("top_k", -1, 2**31 - 1, 0)),
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 0.001, 1000.0, 1.0),
    )
