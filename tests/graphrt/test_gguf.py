"""GGUF conversion: values, row order and configuration against two independent readers; refusals of everything else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, trainers

from graphrt.chat_template import ChatTemplate
from graphrt.config import load_config
from graphrt.errors import ModelError
from graphrt.gguf_convert import SUPPORTED_TYPES, convert_gguf
from graphrt.gguf_file import GgufFile
from graphrt.tokenizer import Tokenizer
from graphrt.weights import open_checkpoint, verify_checkpoint

TinyModel = Callable[..., Path]
# Rows of 256, so that K-quants fit.
WIDE = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 32, "ffn": 512, "layers": 2, "vocab": 320, "dtype": "f32"}
SMALL = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "layers": 1, "vocab": 320, "dtype": "f32"}


def convert(path: Path, folder: Path, **options: Any) -> Path:
    folder.mkdir()
    convert_gguf(path, folder, **options)
    return folder


def rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_every_supported_type(tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path, kind: str) -> None:
    want = gguf_models.write_gguf(tmp_path / "m.gguf", tiny_model("llama", **WIDE), kind)
    got = open_checkpoint(convert(tmp_path / "m.gguf", tmp_path / "out"))
    assert got.names == sorted(want)
    for name, values in want.items():
        tensor = got.tensor(name, values.shape)
        matrix = values.ndim == 2
        assert tensor.dtype == (ml_dtypes.bfloat16 if matrix else np.float32), name
        np.testing.assert_array_equal(tensor.astype(np.float32), rounded(values) if matrix else values, err_msg=name)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_rows_of_llama_are_where_transformers_finds_them(
    tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path, kind: str
) -> None:
    transformers = pytest.importorskip("transformers")
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    model = tiny_model("llama", **SMALL)
    gguf_models.write_gguf(tmp_path / "m.gguf", model, kind)
    empty = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model))
    state = reader.load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=empty)["tensors"]
    got = open_checkpoint(convert(tmp_path / "m.gguf", tmp_path / "out"))
    assert got.names == sorted(state)
    for name in got.names:
        want = state[name].numpy()
        tensor = got.tensor(name, want.shape)
        np.testing.assert_array_equal(
            tensor.astype(np.float32), rounded(want) if tensor.dtype == ml_dtypes.bfloat16 else want, err_msg=name
        )


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("llama", {"tie": True}),
        ("llama", {"attention_bias": True}),
        ("qwen3", {"dtype": "bf16"}),
        ("qwen3", {"tie": True}),
    ],
)
def test_variants(
    tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path, architecture: str, shape: dict[str, Any]
) -> None:
    model = tiny_model(architecture, **SMALL | shape)
    want = gguf_models.write_gguf(tmp_path / "m.gguf", model)
    out = convert(tmp_path / "m.gguf", tmp_path / "out")
    got = open_checkpoint(out)
    assert load_config(out) == load_config(model)
    for name, values in want.items():
        tensor = got.tensor(name, values.shape)
        exact = tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor.astype(np.float32), values if exact else rounded(values), err_msg=name)
    if shape.get("dtype") == "bf16":
        assert {str(got.tensor(n, got.shape(n)).dtype) for n in got.names} == {"bfloat16"}  # norms too: exact there


def test_the_directory_is_whole_and_says_where_it_came_from(
    tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_model("llama", **SMALL)
    gguf_models.write_gguf(tmp_path / "m.gguf", model, "Q4_1")
    seen: list[tuple[int, int]] = []
    out = convert(
        tmp_path / "m.gguf", tmp_path / "out", source={"kind": "here"}, progress=lambda *done: seen.append(done)
    )
    weights = out / "model.safetensors"
    assert seen[-1] == (weights.stat().st_size,) * 2 and seen == sorted(seen)
    record = json.loads((out / "graphrt.json").read_text())
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert record["files"] == {"model.safetensors": {"size": weights.stat().st_size, "sha256": digest}}
    assert record["source"] == {"kind": "here"} and record["license"] == "apache-2.0"
    assert "dequantised from GGUF types F32, Q4_1" in record["note"]
    assert verify_checkpoint(out) == ["model.safetensors"]
    ours, before = Tokenizer.load(out), Tokenizer.load(model)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    for text in ("Hello 123 wörld 😀", "<|im_start|>user\nx<|im_end|>", "def f():\n\treturn  1"):
        assert ours.encode(text) == before.encode(text) == theirs.encode(text, add_special_tokens=False)
    message = [{"role": "user", "content": "Hi"}]
    assert ChatTemplate.load(out).render(message) == theirs.apply_chat_template(
        message, add_generation_prompt=True, tokenize=False
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.generation_config.eos_token_id == 2


LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_rope_is_recovered(tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path) -> None:
    """The file holds the divisors that the scaling comes to, here computed by transformers."""
    torch = pytest.importorskip("torch")
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING}
    model = tiny_model("llama", **SMALL | {"head_dim": 64, "hidden": 256}, rope=parameters)
    scaled, _ = rope.ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_pretrained(model), torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    divisors = (plain / scaled).numpy().astype(np.float32)
    assert divisors.max() > 7.9 and divisors.min() < 1.1 and ((divisors > 1.2) & (divisors < 7.5)).any()
    gguf_models.write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors})
    out = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert load_config(out).rope == load_config(model).rope
    assert "rope_freqs.weight" not in open_checkpoint(out).names
    gguf_models.write_gguf(tmp_path / "n.gguf", model, extra={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(ModelError, match="does not follow Llama 3's rope scaling"):
        convert(tmp_path / "n.gguf", tmp_path / "out2")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, ("default", 1.0, 0)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, ("linear", 4.0, 0)),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0,
             "llama.rope.scaling.original_context_length": 256},
            ("yarn", 2.0, 256),
        ),
    ],
)  # fmt: skip
def test_other_rope_scalings(
    tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path, keys: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    gguf_models.write_gguf(tmp_path / "m.gguf", tiny_model("llama", **SMALL), keys=keys)
    rope = load_config(convert(tmp_path / "m.gguf", tmp_path / "out")).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "Q4_0", "arch": "gptneox"}, "architecture 'gptneox' is not supported, only llama, qwen3"),
        ({"kind": "TQ2_0"}, r"is of type TQ2_0, which is not supported, only F32, F16, BF16, Q4_0"),
        ({"drop": ("blk.1.ffn_up.weight",)}, r"tensor blk\.1\.ffn_up\.weight is missing"),
        ({"drop": ("token_embd.weight",)}, r"tensor token_embd\.weight is missing"),
        (
            {"extra": {"blk.0.ffn_gate.bias": np.zeros(512, np.float32)}},
            r"blk\.0\.ffn_gate\.bias has no place in a llama",
        ),
        (
            {"keys": {"llama.attention.head_count_kv": 4}},
            r"attn_k\.weight has shape \(64, 256\), .* wants \(128, 256\)",
        ),
        ({"keys": {"llama.embedding_length": None}}, "has no embedding_length"),
        ({"keys": {"llama.expert_count": 8}}, r"llama\.expert_count 8 is not supported"),
        ({"keys": {"llama.rope.dimension_count": 16}}, r"rope\.dimension_count 16 differs from the head size 32"),
        (
            {"keys": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}},
            "rope scaling 'longrope'",
        ),
        ({"keys": {"tokenizer.ggml.model": "rwkv"}}, "tokenizer model 'rwkv' is not supported"),
        ({"keys": {"tokenizer.ggml.pre": "tekken"}}, "pre-tokenizer 'tekken' is not supported"),
        ({"keys": {"tokenizer.ggml.merges": ["q zzz"]}}, "merges do not fit its tokens"),
        ({"keys": {"tokenizer.ggml.merges": None}}, r"has no tokenizer\.ggml\.merges"),
        ({"keys": {"tokenizer.ggml.token_type": [1, 1]}}, "no usable tokenizer"),
        ({"keys": {"tokenizer.ggml.tokens": ["a"] * 320}}, "320 tokens are not distinct"),
        ({"keys": {"tokenizer.ggml.eos_token_id": 320}}, r"eos_token_id is 320, the vocabulary has 320 tokens"),
        ({"keys": {"split.count": 3}}, "is one of 3 parts"),
    ],
)
def test_refusals(
    tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    gguf_models.write_gguf(tmp_path / "m.gguf", tiny_model("llama", **WIDE), **options)
    with pytest.raises(ModelError, match=message) as caught:
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert "m.gguf" in str(caught.value)


def test_values_that_are_not_finite(tiny_models: ModuleType, gguf_models: ModuleType, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model = tiny_models.write_tiny_model(tmp_path / "model", **SMALL)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = np.inf
    save_file(tensors, model / "model.safetensors")
    gguf_models.write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight holds values that are not finite"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_truncation_anywhere(tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, tiny_model("llama", **SMALL), "Q8_0")
    data = path.read_bytes()
    GgufFile(path)
    for keep in [0, 3, 23, *range(24, len(data) - 1, 997), len(data) - 1]:
        path.write_bytes(data[:keep])
        with pytest.raises(ModelError, match=r"m\.gguf is truncated"):
            GgufFile(path)


def test_damaged_files_never_fail_otherwise(tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, tiny_model("llama", **SMALL), "Q8_0")
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for at in rng.integers(0, 12000, 3):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            GgufFile(path)
        except ModelError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: b"GGML" + d[4:], "is not a GGUF file"),
        (lambda d: d[:4] + (1).to_bytes(4, "little") + d[8:], "is of GGUF version 1, only 2 and 3"),
        (lambda d: d[:4] + (3).to_bytes(4, "big") + d[8:], "is a big-endian GGUF file"),
    ],
)
def test_other_formats(
    tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path, edit: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "m.gguf"
    gguf_models.write_gguf(path, tiny_model("llama", **SMALL))
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        GgufFile(path)
    with pytest.raises(ModelError, match=r"none\.gguf is missing"):
        GgufFile(tmp_path / "none.gguf")


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float64("f", 0.1)
    writer.add_int64("i", -(2**40))
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("words", ["ä", ""])
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "m.gguf")
    assert {k: file.metadata[k] for k in ("f", "i", "floats", "words")} == {
        "f": 0.1, "i": -(2**40), "floats": [0.5, 1.5], "words": ["ä", ""],
    }  # fmt: skip
    tensor = file.tensors["t"]
    assert (tensor.type_name, tensor.shape) == ("F32", (2, 3))
    assert tensor.data.view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_sentencepiece_vocabulary(tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path) -> None:
    """Merges are rebuilt from scores; the reference is the tokenizer that the scores were taken from."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    inner.train_from_iterator(["the cat sat on the mat and the dog ran to the café over there"] * 4, trainer)
    tokens = [inner.id_to_token(i) for i in range(inner.get_vocab_size())]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    tokenizer = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    model = tiny_model("llama", **SMALL | {"vocab": len(tokens)})
    gguf_models.write_gguf(tmp_path / "m.gguf", model, tokenizer=tokenizer)
    ours = Tokenizer.load(convert(tmp_path / "m.gguf", tmp_path / "out"))
    for text in ["the cat sat", "there  and\nthere", "café 😀 zzz", " the", ""]:
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert ours.encode(text, add_special=True) == [1, *ids]
        # Frequency order and score order rank the same pairs here, so the ids agree.
        plain = [i for i in inner.encode(text).ids if i != 0]
        assert ids == plain
    assert ours.encode("a</s>")[-1] == 2
    assert not ChatTemplate.load(tmp_path / "out").available


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["Don", "'t", " pay", " 12345", "!!", "\n\n", " x"]),
        ("smollm", ["Don", "'t", " pay", " ", "1", "2", "3", "4", "5", "!!", "\n\n", " x"]),
        ("llama-bpe", ["Don", "'t", " pay", " ", "123", "45", "!!\n\n", " x"]),
        ("qwen2", ["Don", "'t", " pay", " ", "1", "2", "3", "4", "5", "!!\n\n", " x"]),
    ],
)
def test_pre_tokenizers(
    tiny_model: TinyModel, gguf_models: ModuleType, tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    gguf_models.write_gguf(tmp_path / "m.gguf", tiny_model("llama", **SMALL), keys={"tokenizer.ggml.pre": pre})
    out = convert(tmp_path / "m.gguf", tmp_path / "out")
    text = "Don't pay 12345!!\n\n x"
    inner = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    spans = [span for _, span in inner.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == pieces
    assert Tokenizer.load(out).decode(Tokenizer.load(out).encode(text)) == text


@pytest.mark.model
def test_the_default_model_answers(default_model: Path) -> None:
    """Seen with transformers, so that this judges the converted files alone."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = load_config(default_model)
    assert (config.num_layers, config.hidden_size, config.tie_embeddings, config.max_position) == (30, 576, True, 8192)
    checkpoint = open_checkpoint(default_model)
    assert sum(np.prod(checkpoint.shape(n)) for n in checkpoint.names) == 134_515_008
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    prompt = ChatTemplate.load(default_model).render([{"role": "user", "content": "What is the capital of France?"}])
    tokenizer = Tokenizer.load(default_model)
    ids = torch.tensor([tokenizer.encode(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :].tolist())
