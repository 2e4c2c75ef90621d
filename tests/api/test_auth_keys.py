"""Files of API keys: their lines, what is wrong with them, and their reload."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from graphrt.api.auth_keys import KeyTable, read_key_files
from graphrt.api.auth_ring import KeyRing
from graphrt.errors import ConfigError

SECRET = "sk-0123456789abcdef"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def read(tmp_path: Path, text: str) -> KeyTable:
    return read_key_files([write(tmp_path / "keys", text)])


def test_the_forms_of_a_line(tmp_path: Path) -> None:
    table = read(
        tmp_path,
        "# people\n\n"
        "sk-plain-key-1234\n"
        "  alice:sk-alice-12345  \n"
        "bob\tsk-bob:with=signs== concurrency=4 rpm=60\r\n"
        "carol rpm=0 sk-carol-12345\n"
        "dave:sk-dave-1234567 concurrency=0\n",
    )
    plain = hashlib.sha256(b"sk-plain-key-1234").hexdigest()[:8]
    assert [(key.name, key.concurrency, key.rpm) for key in table.keys] == [
        (f"key-{plain}", None, None),
        ("alice", None, None),
        ("bob", 4, 60),
        ("carol", None, 0),
        ("dave", 0, None),
    ]
    for secret, name in (("sk-alice-12345", "alice"), ("sk-bob:with=signs==", "bob"), ("sk-dave-1234567", "dave")):
        found = table.find(secret)
        assert found is not None and found.name == name
    for wrong in (
        "",
        "sk-alice-1234",
        "sk-alice-123456",
        "alice",
        "alice:sk-alice-12345",
        "SK-ALICE-12345",
        "é" * 9,
        "\udcff",
    ):
        assert table.find(wrong) is None
    assert "sk-" not in repr(table.keys)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"a {SECRET} b", "line 1: 3 words beside the limits"),
        ("rpm=5", "line 1: 0 words beside the limits"),
        (f"alice {SECRET} rpm=x", "line 1: rpm must be a number from 0"),
        (f"alice {SECRET} rpm=-1", "line 1: rpm must be a number"),
        (f"alice {SECRET} rpm=1 rpm=2", "line 1: rpm is given twice"),
        (f"alice {SECRET} speed=9", "line 1: 3 words"),
        ("alice short", "line 1: the key has 5 characters: must be from 8 to 512"),
        ("alice " + "x" * 513, "line 1: the key has 513 characters"),
        ("alice schlüssel-lang", "line 1: the key holds a character that is not printable ASCII"),
        (f"al/ice {SECRET}", "line 1: the name must be"),
        (f"{SECRET}\n{SECRET}", "line 2: the name key-"),
        (f"a {SECRET}\nb {SECRET}", "line 2: the key is the same as that of"),
        (f"a {SECRET}\na {SECRET}x", "line 2: the name a is that of"),
        ("# nothing\n", "no keys, so nobody could use this server"),
    ],
)
def test_what_is_wrong_is_told_without_showing_a_key(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, line)
    assert said in str(caught.value)
    assert "0123456789" not in str(caught.value) and "short" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key_files([tmp_path / "none"])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_key_files([tmp_path])
    (tmp_path / "bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_key_files([tmp_path / "bin"])
    big = tmp_path / "big"
    big.touch()
    os.truncate(big, 5 << 20)
    with pytest.raises(ConfigError, match="5242880 bytes"):
        read_key_files([big])


def test_several_files_are_one_table(tmp_path: Path) -> None:
    first = write(tmp_path / "a", "alice:sk-alice-12345\n")
    second = write(tmp_path / "b", "bob:sk-bob-1234567\n")
    assert [key.name for key in read_key_files([first, second]).keys] == ["alice", "bob"]
    second.write_text("alice:sk-bob-1234567\n")
    with pytest.raises(ConfigError, match=r"b, line 1: the name alice is that of .*a, line 1"):
        read_key_files([first, second])


def test_a_file_open_to_others_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "keys", SECRET)
    with caplog.at_level(logging.WARNING):
        read_key_files([path])
        assert not caplog.records
        path.chmod(0o644)
        read_key_files([path])
    assert "open to every user" in caplog.text and SECRET not in caplog.text


def test_a_broken_reload_keeps_the_old_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "keys", "alice:sk-alice-12345\n")
    ring = KeyRing([path])
    assert ring.required and ring.names == ["alice"]
    path.write_text("bob:tiny\n")
    assert not ring.reload()
    assert "line 1: the key has 4 characters" in caplog.text and "stay in force" in caplog.text
    assert ring.find("sk-alice-12345") is not None
    path.unlink()
    assert not ring.reload()
    assert ring.names == ["alice"]
    write(path, "bob:sk-bob-1234567\n")
    assert ring.reload()
    assert ring.find("sk-alice-12345") is None and ring.names == ["bob"]


def test_without_files_nobody_needs_a_key() -> None:
    assert not KeyRing().required
