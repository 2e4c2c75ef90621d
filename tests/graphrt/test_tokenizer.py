"""Tokenizers: the ids of the reference, and detokenizing piece by piece that equals detokenizing at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from graphrt.errors import ModelError, RequestError
from graphrt.tokenizer import Tokenizer

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\n\n\nnewlines\r\n   \n  x",
    "def f(x):\n    return [i ** 2 for i in range(10) if i % 2 == 0]  # squares\n",
    "#include <stdio.h>\nint main(void) { printf(\"%d\\n\", 0x7fff); return 0; }",
    "1234567890 3.14159 1e-9 v2.0.1 10,000,000 ٣٤٥ ½ ²",
    "naïve café Ångström Straße Привет, мир! Ελληνικά עברית العربية हिन्दी ไทย",
    "你好，世界。日本語のテキスト、한국어 텍스트",
    "😀😃 👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b\ufeff zero\u00a0width",
    "don't I'm we'll THEY'RE it's 'quoted'",
    '{"key": [1, 2, {"nested": null}], "text": "a\\nb"}',
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start", "a" * 300, "\x00\x01\x7f\x80",
    "ſ ﬁ ① Ⅷ ﷺ \U0001f1e6 \U000e0001 \U0010ffff",
]  # fmt: skip


def chop(ids: list[int], rng: random.Random) -> list[list[int]]:
    pieces = []
    while ids:
        n = rng.choice([1, 1, 1, 2, 5])
        pieces.append(ids[:n])
        ids = ids[n:]
    return pieces


def stream(tokenizer: Tokenizer, pieces: list[list[int]]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(p) for p in pieces), detokenizer.finish()]


def llama2_style(folder: Path, metaspace: str = "") -> Path:
    """A SentencePiece-like BPE with byte fallback, as converted Llama-2 tokenizers are: older, or with Metaspace."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace)
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    inner.train_from_iterator(["the cat sat on the mat and the dog ran to a café"] * 4, trainer)
    data = json.loads(inner.to_str())
    # The byte tokens were only made special to get their ids: Llama-2 has three special tokens.
    data["added_tokens"] = [t for t in data["added_tokens"] if t["id"] < 3]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner = tokenizers.Tokenizer.from_str(json.dumps(data))
    inner.decoder = decoders.Metaspace(prepend_scheme=metaspace) if metaspace else decoders.Sequence(steps)
    inner.save(str(folder / "tokenizer.json"))
    write_config(folder, inner.get_vocab_size())
    return folder


def write_config(folder: Path, vocab: int, **changes: Any) -> None:
    config = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))


def reference(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_ids_and_text_equal_the_reference(tiny_model: Callable[..., Path]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tiny_model("llama", vocab=700)
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        if "<|" not in text:
            assert ours.decode(ids) == text


@pytest.mark.model
def test_default_model_equals_the_reference_and_round_trips(default_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours, theirs = Tokenizer.load(default_model), transformers.AutoTokenizer.from_pretrained(default_model)
    rng = random.Random(1)
    texts = [*CORPUS, *("".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xA0, 0xD7FF)])) for _ in range(60))
                        for _ in range(200))]  # fmt: skip
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        if "<|" not in text:
            assert ours.decode(ids) == text
            assert "".join(stream(ours, [[i] for i in ids])) == text
    assert (ours.eos_ids, ours.vocab_size) == ((2,), 49152)
    # Each digit is a token of its own, special tokens are one token each.
    assert len(ours.encode("1234567")) == 7
    assert ours.encode("<|im_start|>user<|im_end|>")[::2] == [1, 2]


def test_random_ids_stream_to_the_reference_text(tiny_model: Callable[..., Path]) -> None:
    """Random byte-level tokens are mostly invalid UTF-8, cut everywhere."""
    folder = tiny_model("llama", vocab=600)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    rng = random.Random(0)
    invalid = 0
    for _ in range(400):
        ids = [rng.randrange(602) if rng.random() < 0.5 else rng.randrange(3, 259) for _ in range(rng.randrange(40))]
        want = theirs.decode(ids, skip_special_tokens=True)
        invalid += "\ufffd" in want
        assert ours.decode(ids) == want
        assert "".join(stream(ours, chop(ids, rng))) == want
    assert invalid > 100


def test_characters_come_whole_and_at_once(tiny_model: Callable[..., Path]) -> None:
    ours = Tokenizer.load(tiny_model("llama", vocab=320))
    text = "a😀é你b"
    pieces = stream(ours, [[i] for i in ours.encode(text)])
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    detokenizer = ours.detokenizer()
    shown = ""
    for i, token in enumerate(ours.encode(text), 1):
        shown += detokenizer.push([token])
        whole = b"".join(map(ours.token_bytes, ours.encode(text)[:i])).decode(errors="ignore")
        assert shown == whole  # never behind by a whole character, never ahead


def test_a_reply_cut_inside_a_character_ends_with_a_replacement(tiny_model: Callable[..., Path]) -> None:
    ours = Tokenizer.load(tiny_model("llama", vocab=320))
    ids = ours.encode("x😀")[:-1]
    detokenizer = ours.detokenizer()
    assert detokenizer.push(ids) == "x"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(ours.encode("y")) + detokenizer.finish() == "y"


def test_work_and_memory_do_not_grow_with_the_reply(tiny_model: Callable[..., Path]) -> None:
    ours = Tokenizer.load(tiny_model("llama", vocab=320))
    detokenizer = ours.detokenizer()
    rng = random.Random(3)
    for _ in range(5000):
        detokenizer.push([rng.randrange(320)])
        assert len(detokenizer._utf8.getstate()[0]) <= 3


def test_special_and_unknown_ids_are_no_text(tiny_model: Callable[..., Path]) -> None:
    ours = Tokenizer.load(tiny_model("llama", vocab=320))
    ids = ours.encode("😀")
    assert ours.decode([1, ids[0], 2, *ids[1:], 0, 5000, -1]) == "😀"


def test_added_tokens_that_are_not_special_are_text(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    inner = reference(tiny_model("llama", vocab=320))
    inner.add_tokens([AddedToken("<think>", special=False), AddedToken("né é", special=False)])
    inner.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, 322)
    ours = Tokenizer.load(tmp_path)
    assert ours.vocab_size == 322
    ids = ours.encode("a<think>bné é")
    assert {320, 321} <= set(ids)
    assert ours.decode(ids) == inner.decode(ids) == "a<think>bné é"


def test_sentencepiece_style_text(tmp_path: Path) -> None:
    folder = llama2_style(tmp_path)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    rng = random.Random(0)
    for text in ["the cat", " the  dog", "café 😀 你好!", "  two", "a\nb", *CORPUS]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert "".join(stream(ours, chop(ids, rng))) == ours.decode(ids) == theirs.decode(ids)
        if "<" not in text:
            assert ours.decode(ids) == text


def test_sentencepiece_style_random_ids(tmp_path: Path) -> None:
    """Streams equal decode for any ids; decode equals the reference's wherever the bytes are text."""
    folder = llama2_style(tmp_path)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    rng = random.Random(5)
    compared = 0
    for _ in range(500):
        ids = [rng.randrange(430) if rng.random() < 0.6 else rng.randrange(259) for _ in range(rng.randrange(12))]
        want = ours.decode(ids)
        assert "".join(stream(ours, chop(ids, rng))) == want
        if "\ufffd" not in want:
            compared += 1
            assert want == theirs.decode(ids)
    assert compared > 50


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoder(tmp_path: Path, scheme: str) -> None:
    folder = llama2_style(tmp_path, scheme)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    for text in ["the cat sat", "  the dog", "x the"]:
        ids = [i for i in ours.encode(text) if not 3 <= i < 259]
        assert ours.decode(ids) == theirs.decode(ids)
        assert "".join(stream(ours, [[1], *([i] for i in ids)])) == theirs.decode([1, *ids])


def test_bos_is_added_only_on_request(tmp_path: Path) -> None:
    folder = llama2_style(tmp_path)
    inner = reference(folder)
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    inner.save(str(folder / "tokenizer.json"))
    ours = Tokenizer.load(folder)
    long = "the cat sat on the mat " * 5
    plain = ours.encode(long)
    assert len(plain) > 10 and plain[0] != 1 and 0 not in plain
    assert ours.encode(long, add_special=True) == [1, *plain]


def test_end_ids_come_from_all_files(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    reference(tiny_model("llama", vocab=320)).save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, 320, eos_token_id=[7, 2])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert Tokenizer.load(tmp_path).eos_ids == (7, 2, 0)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    assert Tokenizer.load(tmp_path).eos_ids == (7, 2, 1)


def test_text_that_cannot_be_encoded(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    ours = Tokenizer.load(tiny_model("llama", vocab=320))
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        ours.encode("a\ud83d")
    inner = reference(tiny_model("llama", vocab=320))
    inner.add_special_tokens(["<extra>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, 320)
    padded = Tokenizer.load(tmp_path)
    assert padded.encode("abc") == ours.encode("abc")
    with pytest.raises(RequestError, match="holds token 320, the model's vocabulary ends at 319"):
        padded.encode("abc<extra>")


def test_broken_files(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json$"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json \(it has only a tokenizer\.model"):
        Tokenizer.load(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="not valid JSON"):
        Tokenizer.load(tmp_path)
    path.write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer: "):
        Tokenizer.load(tmp_path)
    inner = reference(tiny_model("llama", vocab=320))
    for decoder, name in ((decoders.WordPiece(), "WordPiece"), (None, "none")):
        inner.decoder = decoder
        inner.save(str(path))
        write_config(tmp_path, 320)
        with pytest.raises(ModelError, match=f"decoder {name} is not supported"):
            Tokenizer.load(tmp_path)
