"""Checkpoints: what the safetensors package writes is read without a copy, and every kind of damage has its message."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from graphrt.errors import ModelError
from graphrt.safetensors_file import SafetensorsWriter
from graphrt.weights import Checkpoint, open_checkpoint, verify_checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((8, 6)).astype(np.float32),
        "b.weight": rng.standard_normal((300, 7)).astype(np.float16),
        "c.weight": rng.standard_normal((5,)).astype(BF16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5, np.float32),
    }


def shards(folder: Path, first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> dict[str, Any]:
    index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": {}}
    for i, part in enumerate((first, second), 1):
        name = f"model-0000{i}-of-00002.safetensors"
        save_file(part, folder / name)
        index["weight_map"] |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_reads_what_the_reference_writes_without_a_copy(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names == sorted(tensors)
    assert checkpoint.nbytes == sum(t.nbytes for t in tensors.values())
    for name, want in tensors.items():
        got = checkpoint.tensor(name, want.shape)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
        if want.size:
            assert not got.flags.writeable and not got.flags.owndata
    assert "a.weight" in checkpoint and "z" not in checkpoint
    assert checkpoint.shape("b.weight") == (300, 7)
    assert checkpoint.unused(["a.weight", "b.weight", "never"]) == ["c.weight", "empty", "scalar"]


def test_views_outlive_the_checkpoint(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    view = open_checkpoint(tmp_path).tensor("b.weight", (300, 7))
    (tmp_path / "model.safetensors").unlink()
    np.testing.assert_array_equal(view, tensors["b.weight"])


def test_misaligned_offsets_are_copied(tmp_path: Path) -> None:
    values = np.arange(3, dtype=np.float32)
    header = json.dumps({"a": entry(0, 12)}).encode()
    header += b" " * (-len(header) % 8 + 1)
    raw(tmp_path / "model.safetensors", header, values.tobytes())
    got = open_checkpoint(tmp_path).tensor("a", (3,))
    assert got.flags.aligned
    np.testing.assert_array_equal(got, values)


def test_shards(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    first = {"a.weight": tensors["a.weight"]}
    second = {k: v for k, v in tensors.items() if k not in first}
    shards(tmp_path, first, second)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names == sorted(tensors)
    np.testing.assert_array_equal(checkpoint.tensor("a.weight", (8, 6)), tensors["a.weight"])


def test_index_naming_a_missing_shard(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    shards(tmp_path, {"a.weight": tensors["a.weight"]}, {"c.weight": tensors["c.weight"]})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names model-00002-of-00002\.safetensors, which is missing"):
        open_checkpoint(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    index = {"weight_map": {f"x{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
    for i in (1, 2):
        save_file({f"x{i}": tensors["c.weight"], "twice": tensors["c.weight"]}, tmp_path / index["weight_map"][f"x{i}"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"tensor twice is in both .*00001-of-00002.* and .*00002-of-00002"):
        open_checkpoint(tmp_path)


def test_index_that_lies(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    index = shards(tmp_path, {"a.weight": tensors["a.weight"]}, {"c.weight": tensors["c.weight"]})
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"ghost": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match="places tensor ghost in model-00001-of-00002"):
        open_checkpoint(tmp_path)
    path.write_text(json.dumps({"weight_map": {"a.weight": "../../secrets.safetensors"}}))
    with pytest.raises(ModelError, match="is not a plain file name"):
        open_checkpoint(tmp_path)
    path.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelError, match="has no weight_map"):
        open_checkpoint(tmp_path)


def test_missing_file_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json$"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"\(found pytorch_model\.bin\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 0.5, -1])
def test_truncated(tmp_path: Path, tensors: dict[str, np.ndarray], keep: float) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        open_checkpoint(tmp_path)


FULL = bytes(16)


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"a": entry(0, 16)}, FULL, 10**6, "is truncated: header of 1000000 bytes in a file of"),
        ({"a": entry(0, 16)}, FULL, 2**63, "header of 9223372036854775808 bytes, at most 104857600"),
        ({"a": entry(0, 16)}, FULL + b"x", None, "has 1 bytes after its last tensor"),
        ({"a": entry(0, 20)}, FULL, None, "is truncated: its header describes"),
        ({"a": entry(0, 12), "b": entry(8, 16)}, FULL, None, "tensor b overlaps a"),
        ({"a": entry(0, 16), "b": entry(0, 16)}, FULL, None, "tensor b overlaps a"),
        ({"a": entry(0, 4), "b": entry(8, 16)}, FULL, None, "4 bytes between a and b belong to no tensor"),
        ({"a": entry(0, 16, shape=[5])}, FULL, None, r"shape \(5,\) in F32 takes 20 bytes, its offsets give 16"),
        ({"a": entry(16, 0, shape=[4])}, FULL, None, "offsets 16 to 0"),
        ({"a": entry(-4, 12, shape=[4])}, FULL, None, "entry for tensor a is malformed"),
        ({"a": {"dtype": "F32", "shape": [4]}}, FULL, None, "entry for tensor a is malformed"),
        ({"a": {**entry(0, 16), "shape": [True, 4]}}, FULL, None, "entry for tensor a is malformed"),
        ({"a": [1]}, FULL, None, "entry for tensor a is malformed"),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":1}', FULL, None, "malformed|appears twice"),
        (b"[]", b"", None, "header is not a JSON object"),
        (b'{"a', b"", None, "not valid JSON"),
        (b"\xff\xfe\xff", b"", None, "not valid JSON"),
    ],
)
def test_damaged_header(tmp_path: Path, header: Any, data: bytes, length: int | None, message: str) -> None:
    raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "model.safetensors" in str(caught.value)


def test_repeated_name(tmp_path: Path) -> None:
    one = '"a":{"dtype":"F32","shape":[2],"data_offsets":[%d,%d]}'
    raw(tmp_path / "model.safetensors", f"{{{one % (0, 8)},{one % (8, 16)}}}".encode(), FULL)
    with pytest.raises(ModelError, match="tensor a appears twice"):
        open_checkpoint(tmp_path)


def test_missing_tensor_names_the_near_ones(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)]
    save_file({n: np.zeros(2, np.float32) for n in names}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(
        ModelError, match=r"model\.layers\.3\.self_attn\.q_proj\.weight is missing; near names: .*layers"
    ):
        checkpoint.tensor("model.layers.3.self_attn.q_proj.weight", (2,))
    with pytest.raises(ModelError, match=r"tensor zz is missing$"):
        checkpoint.shape("zz")


def test_wrong_shape(tmp_path: Path) -> None:
    save_file({"a": np.zeros((4, 6), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor a has shape \(4, 6\), the configuration wants \(6, 4\)"):
        open_checkpoint(tmp_path).tensor("a", (6, 4))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I64", "U8", "F99"])
def test_other_types_are_refused_only_when_asked_for(tmp_path: Path, dtype: str) -> None:
    width = {"I64": 8}.get(dtype, 1)
    header = {"good": entry(0, 8), "odd": entry(8, 8 + 2 * width, dtype, [2])}
    raw(tmp_path / "model.safetensors", header, bytes(8 + 2 * width))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensor("good", (2,)).tolist() == [0, 0]
    with pytest.raises(ModelError, match=f"tensor odd is {dtype}, which is not supported, only F32, F16, BF16"):
        checkpoint.tensor("odd", (2,))


def record(folder: Path, **changes: Any) -> None:
    data = (folder / "model.safetensors").read_bytes()
    fields = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} | changes
    (folder / "graphrt.json").write_text(json.dumps({"files": {"model.safetensors": fields}}))


def test_verify(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    assert verify_checkpoint(tmp_path) == []
    record(tmp_path)
    seen: list[int] = []
    assert verify_checkpoint(tmp_path, seen.append) == ["model.safetensors"]
    assert sum(seen) == path.stat().st_size
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    open_checkpoint(tmp_path)  # a flipped bit is for verify to find: opening reads no tensor
    with pytest.raises(ModelError, match=r"model\.safetensors has SHA-256 [0-9a-f]{64}, graphrt\.json records"):
        verify_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        verify_checkpoint(tmp_path)


def test_recorded_size_is_checked_at_open(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    record(tmp_path, size=5)
    with pytest.raises(
        ModelError, match=r"bytes, graphrt\.json records 5: remove the directory \(rm -r .*\), then fetch"
    ):
        open_checkpoint(tmp_path)


def test_fingerprint_follows_content(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    config.write_text("{}")
    save_file(tensors, path)

    def fingerprint() -> bytes:
        return open_checkpoint(tmp_path).fingerprint()

    first = fingerprint()
    assert len(first) == 32 and first == fingerprint()
    seen = {first}
    for name in ("a.weight", "b.weight", "c.weight", "scalar"):
        changed = {k: v.copy() for k, v in tensors.items()}
        changed[name].reshape(-1)[-1] += 1
        save_file(changed, path)
        seen.add(fingerprint())
    save_file(tensors, path)
    assert fingerprint() == first
    config.write_text('{"rope_theta": 2}')
    seen.add(fingerprint())
    assert len(seen) == 6


def test_writer_writes_what_the_reference_reads(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    kinds = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", BF16: "BF16"}
    buffer = io.BytesIO()
    layout = [(n, kinds[t.dtype], t.shape) for n, t in tensors.items()]
    writer = SafetensorsWriter(buffer, layout, {"format": "pt"})
    with pytest.raises(ValueError, match="5 tensors are not written"):
        writer.close()
    for name, tensor in tensors.items():
        writer.write(name, [tensor[:2], tensor[2:]] if tensor.ndim else [tensor])
    assert writer.close() == hashlib.sha256(buffer.getvalue()).hexdigest()
    assert writer.size == len(buffer.getvalue())
    path = tmp_path / "model.safetensors"
    path.write_bytes(buffer.getvalue())
    for name, got in load_file(path).items():
        np.testing.assert_array_equal(got.astype(np.float32), tensors[name].astype(np.float32))
    assert isinstance(open_checkpoint(tmp_path), Checkpoint)
    for name, part, message in (
        ("c.weight", tensors["c.weight"], "a.weight is next, not c.weight"),
        ("a.weight", tensors["b.weight"], "announced as F32, not float16"),
        ("a.weight", tensors["a.weight"][:7], r"announced with shape \(8, 6\), 42 elements came"),
    ):
        with pytest.raises(ValueError, match=message):
            SafetensorsWriter(io.BytesIO(), layout, {}).write(name, [part])
