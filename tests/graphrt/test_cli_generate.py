"""`graphrt generate` through a real engine process, on a tiny random model."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphrt.chat_template import ChatTemplate
from graphrt.cli import main as cli
from graphrt.cli.generate import reply_length
from graphrt.errors import ConfigError, RequestError
from graphrt.tokenizer import Tokenizer


def generate(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main(["generate", *argv, "--json"]) == 0
    reply: dict[str, Any] = json.loads(capsys.readouterr().out)
    return reply


def test_the_stream_and_the_json_say_the_same(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_model("llama"))
    reply = generate(capsys, folder, "hello", "--max-tokens", "12")
    prompt = ChatTemplate.load(Path(folder)).render([{"role": "user", "content": "hello"}])
    assert reply["prompt_tokens"] == len(Tokenizer.load(Path(folder)).encode(prompt))
    assert 1 <= reply["completion_tokens"] <= 12
    assert reply["finish_reason"] == ("length" if reply["completion_tokens"] == 12 else "stop")
    assert cli.main(["generate", folder, "hello", "--max-tokens", "12"]) == 0
    shown = capsys.readouterr()
    assert shown.out == reply["text"] + "\n"
    assert shown.err.strip().splitlines()[-1].startswith(f"[{reply['completion_tokens']} token")


def test_a_seed_repeats_and_no_seed_differs(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(tiny_model("llama")), "hello", "--raw", "--max-tokens", "24", "--temperature", "1"]
    first = generate(capsys, *flags)
    other = generate(capsys, *flags)
    assert first["seed"] != other["seed"] and first["text"] != other["text"]
    again = generate(capsys, *flags, "--seed", str(first["seed"]))
    assert (again["text"], again["seed"]) == (first["text"], first["seed"])


def test_raw_text_from_stdin(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama")
    monkeypatch.setattr(sys, "stdin", io.StringIO("once upon a time"))
    reply = generate(capsys, str(folder), "-", "--raw", "--max-tokens", "3")
    assert reply["prompt_tokens"] == len(Tokenizer.load(folder).encode("once upon a time"))


def test_the_length_of_a_reply() -> None:
    assert reply_length(None, 10, 8192) == 256
    assert reply_length(None, 8000, 8192) == 192
    assert reply_length(192, 8000, 8192) == 192
    with pytest.raises(ConfigError, match="--max-tokens is 193: at most 192 fit"):
        reply_length(193, 8000, 8192)
    with pytest.raises(RequestError, match="8192 tokens, the model's context is 8192"):
        reply_length(None, 8192, 8192)
    with pytest.raises(RequestError, match="the prompt is empty"):
        reply_length(None, 0, 8192)


def test_interrupted_in_the_middle(tiny_model: Callable[..., Path]) -> None:
    """Ctrl-C goes to the whole group, as from a terminal; nothing stays behind."""
    folder = tiny_model("llama", max_position=65536)
    command = [sys.executable, "-m", "graphrt", "generate", str(folder), "hi", "--raw"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "60000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert said.decode().splitlines()[-1] == "graphrt generate: interrupted"
    left = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True)
    assert left.stdout == ""
