"""GGUF to a model directory: the values are dequantised and rounded to bfloat16, a piece at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from graphrt import __version__
from graphrt.config import load_config
from graphrt.errors import ModelError
from graphrt.gguf_file import GgufFile
from graphrt.gguf_layout import Planned, plan_tensors, read_config
from graphrt.gguf_tokenizer import token_id, write_tokenizer
from graphrt.safetensors_file import SafetensorsWriter
from graphrt.weights import RECORD, SINGLE

SUPPORTED_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
_PIECE = 1 << 20  # elements dequantised at once: small enough for the cache, large enough for NumPy


def convert_gguf(
    path: Path,
    folder: Path,
    *,
    source: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills the existing, empty `folder` from the GGUF file at `path`.

    `source` is recorded in graphrt.json; `progress(done, total)` counts bytes of model.safetensors. ModelError on a damaged
    file, and on architectures, tensor types or tokenizers that are not supported.
    """
    gguf = GgufFile(path)
    config = read_config(gguf)
    plan = plan_tensors(gguf, config)
    for planned in plan:
        if planned.source.type_name not in SUPPORTED_TYPES:
            raise ModelError(
                f"{path}: tensor {planned.source.name} is of type {planned.source.type_name}, which is not supported, "
                f"only {', '.join(SUPPORTED_TYPES)}"
            )
    _write_json(folder / "config.json", config | _special_ids(gguf))
    _write_json(folder / "generation_config.json", _generation_config(gguf))
    load_config(folder)
    write_tokenizer(gguf, folder, config["max_position_embeddings"])
    with (folder / SINGLE).open("wb") as file:
        dtypes = {p.name: _stored_dtype(p) for p in plan}
        # Wider types first, so that every tensor is aligned.
        plan.sort(key=lambda p: dtypes[p.name] != "F32")
        layout = [(p.name, dtypes[p.name], p.source.shape) for p in plan]
        writer = SafetensorsWriter(file, layout, {"format": "pt"})
        for planned in plan:
            writer.write(planned.name, _values(planned, dtypes[planned.name]))
            if progress:
                progress(file.tell(), writer.size)
        digest = writer.close()
    types = sorted({p.source.type_name for p in plan})
    record = {
        "format": 1,
        "created_by": f"graphrt {__version__}",
        "source": source or {"kind": "gguf", "file": path.name},
        "license": gguf.metadata.get("general.license"),
        "note": f"Values dequantised from GGUF types {', '.join(types)} and rounded to bfloat16: not the precision of "
        "the original checkpoint.",
        "files": {SINGLE: {"size": writer.size, "sha256": digest}},
    }
    _write_json(folder / RECORD, record)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _special_ids(gguf: GgufFile) -> dict[str, int]:
    ids = {"bos": token_id(gguf, "bos"), "eos": token_id(gguf, "eos"), "pad": token_id(gguf, "padding")}
    return {f"{name}_token_id": value for name, value in ids.items() if value is not None}


def _generation_config(gguf: GgufFile) -> dict[str, Any]:
    ends = [token_id(gguf, "eos"), token_id(gguf, "eot")]
    eos = list(dict.fromkeys(i for i in ends if i is not None))
    return _special_ids(gguf) | ({"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {})


def _pieces(planned: Planned) -> Iterator[np.ndarray[Any, Any]]:
    """The tensor's values as float32, some rows at a time, in the order of the new file."""
    source = planned.source
    step = max(1, _PIECE // source.shape[-1])
    # One-dimensional tensors are one row of bytes here; only their elements can be reordered.
    by_row = len(source.shape) > 1
    kind = GGMLQuantizationType[source.type_name]
    for begin in range(0, source.data.shape[0], step):
        rows: Any = slice(begin, begin + step)
        if planned.rows is not None and by_row:
            rows = planned.rows[rows]
        values = dequantize(np.ascontiguousarray(source.data[rows]), kind)
        yield values if planned.rows is None or by_row else values.reshape(-1)[planned.rows]


def _stored_dtype(planned: Planned) -> str:
    """BF16; vectors (norms, biases) stay F32 where bfloat16 would lose bits: they cost nothing."""
    if len(planned.source.shape) > 1:
        return "BF16"
    values = next(_pieces(planned))
    return "BF16" if np.array_equal(values, values.astype(ml_dtypes.bfloat16).astype(np.float32)) else "F32"


def _values(planned: Planned, dtype: str) -> Iterator[np.ndarray[Any, Any]]:
    for values in _pieces(planned):
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {planned.source.name} holds values that are not finite: the file is damaged")
        yield values.astype(ml_dtypes.bfloat16) if dtype == "BF16" else values
