"""The command line as scripts see it: exit codes, one-line errors, help, quiet pipes."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from graphrt import __version__
from graphrt.cli import main as cli
from graphrt.cli.parser import integer, number, size
from graphrt.errors import ModelError

COMMANDS = ("serve", "generate", "pull", "doctor")


def usage_error(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, wanted in ((["--version"], f"graphrt {__version__}"), (["--help"], "example:")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 0
        assert wanted in capsys.readouterr().out
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"example:\n  graphrt {command}" in shown
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["serve", "--port", "70000"], "argument --port: 70000 is out of range: must be from 0 to 65535"),
        (["serve", "--port", "-1"], "must be from 0 to 65535"),
        (["serve", "--port", "http"], "'http' is not an integer"),
        (["serve", "--ctx", "0"], "argument --ctx: 0 is out of range"),
        (["serve", "--max-batch", "0"], "must be from 1 to 256"),
        (["serve", "--max-batch", "257"], "must be from 1 to 256"),
        (["serve", "--max-waiting", "-1"], "argument --max-waiting"),
        (["serve", "--threads", "0"], "argument --threads"),
        (["serve", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["serve", "--kv-memory", "lots"], "'lots' is not a size"),
        (["serve", "--kv-memory", "0"], "must be at least 1"),
        (["serve", "--por", "1"], "unrecognized arguments: --por"),
        (["serve", "a", "b"], "unrecognized arguments: b"),
        (["generate", "m"], "the following arguments are required: PROMPT"),
        (["generate", "m", "p", "--max-tokens", "0"], "argument --max-tokens: 0 is out of range"),
        (["generate", "m", "p", "--temperature", "-1"], "argument --temperature: -1.0 is out of range"),
        (["generate", "m", "p", "--temperature", "nan"], "argument --temperature: nan is out of range"),
        (["generate", "m", "p", "--seed", "-1"], "argument --seed"),
        (["generate", "m", "p", "--seed", str(1 << 64)], "argument --seed"),
    ],
)
def test_wrong_usage_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = usage_error(argv, capsys)
    assert said in shown
    assert "--help)" in shown


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("1000000", 10**6), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5G", 1_500_000_000), ("3 kb", 3000)],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "1TiBB", "-1", "1e9", "0x10", "1.5.2G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


def test_ranges_include_their_ends() -> None:
    assert [integer(1, 3)(text) for text in ("1", "3")] == [1, 3]
    assert [number(0, 1)(text) for text in ("0", "1")] == [0.0, 1.0]
    for bad in ("0", "4", "1.0"):
        with pytest.raises(argparse.ArgumentTypeError):
            integer(1, 3)(bad)
    with pytest.raises(argparse.ArgumentTypeError):
        number(0, 1)("inf")


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHRT_DEBUG", raising=False)
    assert cli.main(["pull", "no-such-model"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("graphrt pull: error: no model 'no-such-model'")
    assert printed.err.count("\n") == 1


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_DEBUG", "1")
    with pytest.raises(ModelError):
        cli.main(["pull", "no-such-model"])


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_wrong_model_lists_what_there_is(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "models" / "my-model"
    there.mkdir(parents=True)
    (there / "config.json").write_text("{}")
    monkeypatch.setenv("GRAPHRT_HOME", str(tmp_path))
    assert cli.main([command, "other", *(["hello"] if command == "generate" else [])]) == 1
    shown = capsys.readouterr().err
    assert "'other'" in shown and "my-model" in shown and "smollm2-135m-instruct" in shown


def test_interrupting_ends_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphrt.pull.pull", interrupted)
    assert cli.main(["pull"]) == 130
    assert capsys.readouterr().err == "graphrt pull: interrupted\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "graphrt", "doctor"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 128 + signal.SIGPIPE
