"""`graphrt serve`: what its flags become."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from graphrt.api.settings import ServerSettings
from graphrt.cli import device
from graphrt.cli import main as cli
from graphrt.doctor.driver import Driver, Gpu
from graphrt.errors import DeviceError

NO_GPU = Driver(None, "", (), "no NVIDIA GPU")
H200 = Driver((13, 0), "580.1", (Gpu("NVIDIA H200", 141 << 30, (9, 0)),), "")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """What `run_server` was called with, instead of a server."""
    calls: list[ServerSettings] = []

    def run_server(settings: ServerSettings) -> int:
        calls.append(settings)
        return 0

    monkeypatch.setattr("graphrt.api.server.run_server", run_server)
    monkeypatch.setattr("graphrt.cli.device.probe", lambda: NO_GPU)
    return calls


def test_flags_become_settings(served: list[ServerSettings], tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    flags = "--host 0.0.0.0 --port 0 --max-batch 4 --ctx 64 --max-waiting 0 --kv-memory 16MiB --threads 1 --device cpu"
    assert cli.main(["serve", str(folder), *flags.split(), "--served-model-name", "tiny"]) == 0
    [settings] = served
    settings.check()
    assert (settings.host, settings.port, settings.model_name) == ("0.0.0.0", 0, "tiny")
    engine = settings.engine
    assert (engine.model_dir, engine.device) == (str(folder), "cpu")
    assert (engine.max_batch, engine.context, engine.max_waiting) == (4, 64, 0)
    assert (engine.kv_bytes, engine.threads) == (16 << 20, 1)


def test_the_defaults(
    served: list[ServerSettings], tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model("llama")
    assert cli.main(["serve", str(folder)]) == 0
    [settings] = served
    settings.check()
    assert (settings.host, settings.port, settings.model_name) == ("127.0.0.1", 8000, folder.name)
    assert settings.engine.device == "cpu"
    assert "device cpu (no NVIDIA GPU)" in capsys.readouterr().err


def test_without_a_model_the_default_is_fetched_once(
    served: list[ServerSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHRT_HOME", str(tmp_path))
    fetched: list[str] = []

    def pull(name: str, to: Path | None) -> Path:
        fetched.append(name)
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    monkeypatch.setattr("graphrt.pull.pull", pull)
    assert cli.main(["serve"]) == cli.main(["serve"]) == cli.main(["serve", "smollm2-135m-instruct"]) == 0
    assert fetched == ["smollm2-135m-instruct"]
    assert {settings.model_dir for settings in served} == {tmp_path / "models" / "smollm2-135m-instruct"}


def test_the_device_is_chosen_with_a_reason() -> None:
    assert device.choose("cpu", H200) == ("cpu", "as asked")
    assert device.choose("auto", NO_GPU) == ("cpu", "no NVIDIA GPU")
    assert device.choose("auto", H200) == ("cuda", "NVIDIA H200")
    assert device.choose("cuda", H200) == ("cuda", "NVIDIA H200")


def test_the_batch_suits_the_device_unless_it_is_given(
    served: list[ServerSettings], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphrt.cli.device.probe", lambda: H200)
    folder = str(tiny_model("llama"))
    for flags in ("", "--device cpu", "--max-batch 3 --prefill-chunk 2048"):
        assert cli.main(["serve", folder, *flags.split()]) == 0
    assert [(s.engine.device, s.engine.max_batch, s.engine.prefill_chunk) for s in served] == [
        ("cuda", 64, None),
        ("cpu", 8, None),
        ("cuda", 3, 2048),
    ]


A100 = replace(H200, gpus=(Gpu("NVIDIA A100", 80 << 30, (8, 0)),))
OLD_DRIVER = replace(H200, cuda=(12, 4), problem="the driver supports CUDA 12.4, needed is 13.0 (driver 580 or newer)")


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (NO_GPU, "no NVIDIA GPU"),
        (OLD_DRIVER, r"the driver supports CUDA 12\.4, needed is 13\.0 \(driver 580 or newer\)"),
        (A100, r"NVIDIA A100 has compute capability 8\.0, needed is 9\.0 \(Hopper\) or newer"),
    ],
)
def test_cuda_is_refused_with_the_reason(driver: Driver, why: str) -> None:
    with pytest.raises(DeviceError, match=f"^device cuda: {why}; use --device cpu or auto$"):
        device.choose("cuda", driver)
    chosen, said = device.choose("auto", driver)
    assert chosen == "cpu" and re.fullmatch(why, said)


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("graphrt.kernels.cuda.jit.importlib.import_module", absent)
    with pytest.raises(DeviceError, match=r"cuda\.core.*pip install 'graphrt\[cuda\]'"):
        device.choose("cuda", H200)
    assert device.choose("auto", H200)[0] == "cpu"


def test_asking_for_cuda_fails_before_anything_is_fetched(
    served: list[ServerSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHRT_HOME", str(tmp_path))
    assert cli.main(["serve", "--device", "cuda"]) == 1
    assert capsys.readouterr().err.startswith("graphrt serve: error: device cuda: no NVIDIA GPU;")
    assert not served and not list(tmp_path.iterdir())


def test_flags_of_the_http_server(served: list[ServerSettings], tiny_model: Callable[..., Path]) -> None:
    flags = (
        "--api-key-file /k1 --api-key-file /k2 --max-concurrency 9 --max-concurrency-per-key 3"
        " --requests-per-minute-per-key 60 --guard-metrics --cors-origin https://a.example --cors-origin *"
        " --tls-cert /c.pem --tls-key /k.pem --request-timeout 30 --send-timeout 2.5 --drain-timeout 4"
        " --log-level debug --log-json"
    )
    assert cli.main(["serve", str(tiny_model("llama")), *flags.split()]) == 0
    [settings] = served
    assert settings.api_key_files == (Path("/k1"), Path("/k2"))
    assert (settings.max_concurrency, settings.key_concurrency, settings.key_rpm) == (9, 3, 60)
    assert settings.guard_metrics and settings.cors_origins == ("https://a.example", "*")
    assert (settings.tls_cert, settings.tls_key) == (Path("/c.pem"), Path("/k.pem"))
    assert (settings.request_timeout_s, settings.send_timeout_s, settings.drain_timeout_s) == (30, 2.5, 4)
    assert (settings.log_level, settings.log_json) == ("debug", True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--requests-per-minute-per-key 5", "give --api-key-file"),
        ("--tls-cert /c.pem", "both --tls-cert and --tls-key"),
        ("--cors-origin example.org", "'example.org': must be like https://example.org:8443"),
    ],
)
def test_flags_that_do_not_fit_together(
    served: list[ServerSettings],
    tiny_model: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    flags: str,
    said: str,
) -> None:
    assert cli.main(["serve", str(tiny_model("llama")), *flags.split()]) == 1
    assert said in capsys.readouterr().err and not served
