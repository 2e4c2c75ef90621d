"""The doctor on machines that this one is not."""

from __future__ import annotations

import ctypes
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphrt.cli import main as cli
from graphrt.doctor import accelerator, driver, machine, models, network, report
from graphrt.doctor.check import Check
from graphrt.doctor.driver import Driver, Gpu

DRIVER_FILE = Path(driver.__file__)


def test_the_report_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in said["checks"]]
    wanted = ("CPU", "memory", "disk", "Python", "numba", "GPU", "driver", "NVRTC", "cuda.core", "CuPy", "RDMA")
    assert [name for name in (*wanted, "pyverbs", "Redis") if name not in names] == []
    assert {check["state"] for check in said["checks"]} <= {"ok", "missing", "optional"}
    assert code == (0 if said["can_serve"] else 1)
    assert cli.main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(names) + 1
    assert all(name in line for name, line in zip(names, lines, strict=False))


def test_only_what_is_missing_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    optional = Check("Redis", "optional", "not installed", "apt-get install redis-server")
    assert report.can_serve([optional])
    short = Check("memory", "missing", "12 MiB available")
    monkeypatch.setattr(report, "examine", lambda: [optional, short])
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "optional  Redis   not installed  -> apt-get install redis-server",
        "missing   memory  12 MiB available",
        "This machine cannot serve a model yet: see memory.",
    ]


def test_a_check_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Check]:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(accelerator, "checks", broken)
    [line] = [check for check in report.examine() if check.name == "GPU"]
    assert line.state == "optional" and "RuntimeError: no such thing" in line.detail


def test_the_table_holds_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    report.show_table([Check("Redis", "optional", "not installed", "apt-get install redis-server")])
    assert "-> apt-get install redis-server" in capsys.readouterr().out


# -- GPU ------------------------------------------------------------------------------------------------------------------


class FakeLibcuda:
    """The calls of libcuda that the probe makes, on `gpus` devices."""

    def __init__(self, version: int, gpus: int = 1, init: int = 0) -> None:
        self.version, self.gpus, self.init = version, gpus, init

    def cuDriverGetVersion(self, out: object) -> int:
        out._obj.value = self.version  # type: ignore[attr-defined]
        return 0

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuGetErrorName(self, code: int, out: object) -> int:
        out._obj.value = b"CUDA_ERROR_NO_DEVICE"  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetCount(self, out: object) -> int:
        out._obj.value = self.gpus  # type: ignore[attr-defined]
        return 0

    def cuDeviceGet(self, out: object, index: int) -> int:
        return 0

    def cuDeviceGetName(self, name: ctypes.Array[ctypes.c_char], size: int, handle: object) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, out: object, handle: object) -> int:
        out._obj.value = 141 << 30  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetAttribute(self, out: object, attribute: int, handle: object) -> int:
        out._obj.value = {75: 9, 76: 0}[attribute]  # type: ignore[attr-defined]
        return 0


@pytest.mark.parametrize(
    ("lib", "fits", "problem"),
    [
        (FakeLibcuda(13010, gpus=2), True, ""),
        (FakeLibcuda(12080), False, "the driver supports CUDA 12.8, needed is 13.0 (driver 580 or newer)"),
        (FakeLibcuda(13000, init=100), False, "cuInit fails: CUDA_ERROR_NO_DEVICE"),
        (FakeLibcuda(13000, gpus=0), False, "the driver sees no GPU"),
    ],
)
def test_what_the_driver_says(
    lib: FakeLibcuda, fits: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: lib)
    found = driver.probe()
    assert (found.fits, found.problem) == (fits, problem)
    if fits:
        assert found.cuda == (13, 1)
        assert found.gpus == (Gpu("NVIDIA H200", 141 << 30, (9, 0)),) * 2


def test_a_gpu_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x040300\n")  # its audio function
    assert not driver.on_pci(tmp_path)
    (card / "class").write_text("0x030200\n")
    assert driver.on_pci(tmp_path)
    (card / "vendor").write_text("0x8086\n")
    assert not driver.on_pci(tmp_path)


def test_lines_about_the_gpu() -> None:
    h200 = Gpu("NVIDIA H200", 141 << 30, (9, 0))
    two = Driver((13, 0), "580.95", (h200, h200), "")
    assert accelerator.gpu(two).detail.startswith("2 x NVIDIA H200 (141.0 GiB, sm_90)")
    assert accelerator.gpu(two).state == "ok"
    a100 = accelerator.gpu(Driver((13, 0), "580.95", (Gpu("NVIDIA A100", 80 << 30, (8, 0)),), ""))
    assert a100.state == "optional" and "needed is sm_90 (Hopper) or newer" in a100.detail
    assert accelerator.driver_release(two) == Check("driver", "ok", "580.95, supports CUDA 13.0")
    old = accelerator.driver_release(Driver((12, 8), "570.1", (h200,), "too old"))
    assert old.state == "optional" and "CUDA 12.8: too old" in old.detail and "580" in old.fix


def test_the_probe_runs_before_anything_is_installed() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(DRIVER_FILE)], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == (0 if driver.probe().fits else 1)
    assert len(done.stdout.splitlines()) == 1


def test_a_package_is_imported_to_see_that_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "grt_broken.py").write_text("raise OSError('libnvrtc.so.13: cannot open\\nmore')")
    (tmp_path / "grt_fine.py").write_text("")
    assert accelerator.package("X", "grt_absent", "x", "pip install x") == Check(
        "X", "optional", "not installed", "pip install x"
    )
    broken = accelerator.package("X", "grt_broken", "x", "pip install x")
    assert broken.detail == "does not load: OSError: libnvrtc.so.13: cannot open"
    assert accelerator.package("X", "grt_fine", "pytest", "").detail == pytest.__version__


# -- network --------------------------------------------------------------------------------------------------------------


def test_rdma_devices(tmp_path: Path) -> None:
    assert network.rdma_devices(tmp_path / "none").state == "optional"
    assert network.rdma_devices(tmp_path).state == "optional"
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (tmp_path / "rxe0").mkdir()
    assert network.rdma_devices(tmp_path) == Check("RDMA", "ok", "mlx5_0 (active), rxe0 (no port)")


@pytest.fixture
def without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)  # makes the import fail


@pytest.mark.usefixtures("without_pyverbs")
def test_pyverbs_must_match_the_interpreter(tmp_path: Path) -> None:
    absent = network.pyverbs(tmp_path)
    assert (absent.state, absent.fix) == ("optional", "apt-get install python3-pyverbs")
    folder = tmp_path / "pyverbs"
    folder.mkdir()
    (folder / "device.cpython-39-x86_64-linux-gnu.so").touch()
    other = network.pyverbs(tmp_path)
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"is built for Python 3.9, this is {mine}" in other.detail
    assert other.fix == "make clean install PYTHON=python3.9"
    (folder / f"device.cpython-3{sys.version_info.minor}-x86_64-linux-gnu.so").touch()
    hidden = network.pyverbs(tmp_path)
    assert "does not see" in hidden.detail and hidden.fix.startswith(f"ln -s {tmp_path}/pyverbs ")


def test_pyverbs_that_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", SimpleNamespace(device=None))
    monkeypatch.setitem(sys.modules, "pyverbs.device", SimpleNamespace())
    assert network.pyverbs(tmp_path).state == "ok"


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], int]]:
    """`answering(reply) -> port` of a server that answers one connection with `reply`."""
    sockets: list[socket.socket] = []

    def start(reply: bytes) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        sockets.append(server)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if connection.recv(64) == b"PING\r\n":
                    connection.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        return int(server.getsockname()[1])

    yield start
    for server in sockets:
        server.close()


def test_redis(answering: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.redis("127.0.0.1", answering(b"+PONG\r\n")).state == "ok"
    assert network.redis("127.0.0.1", answering(b"-NOAUTH Authentication required.\r\n")).state == "ok"
    stranger = network.redis("127.0.0.1", answering(b"HTTP/1.1 400 Bad Request\r\n"))
    assert stranger.state == "optional" and "other than Redis" in stranger.detail
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = int(unused.getsockname()[1])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert network.redis("127.0.0.1", closed).fix == "apt-get install redis-server"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert network.redis("127.0.0.1", closed).detail == "/usr/bin/redis-server is not running"


# -- machine and models -----------------------------------------------------------------------------------------------------


def test_cpus(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu fma avx2 amx_bf16\n")
    assert "Some Xeon" in machine.cpu(info).detail and machine.cpu(info).detail.endswith("avx2 fma amx_bf16")
    info.write_text("processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n")
    assert machine.cpu(info).detail.endswith("asimd sve")


def test_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 8 << 30)
    assert machine.memory() == Check("memory", "ok", "8.0 GiB available")
    monkeypatch.setattr(machine, "available_memory", lambda: 100 << 20)
    assert machine.memory().state == "missing"
    where = tmp_path / "not" / "there" / "yet"
    assert machine.disk(where, False).state == "ok"
    assert not where.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    assert machine.disk(where, False).state == "missing"
    assert machine.disk(where, True).state == "optional"


def test_without_numba_the_machine_still_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    line = machine.numba()
    assert line.state == "optional" and "pip install numba" in line.fix


def test_models_on_disk(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_HOME", str(tmp_path))
    [none] = models.checks()
    assert (none.state, none.fix) == ("optional", "graphrt pull")
    folder = tmp_path / "models" / "mine"
    shutil.copytree(tiny_model("llama"), folder)
    [whole] = models.checks()
    assert (whole.name, whole.state) == ("model mine", "ok") and "no recorded hash" in whole.detail
    size = (folder / "model.safetensors").stat().st_size
    record = {"files": {"model.safetensors": {"size": size, "sha256": "0" * 64}}}
    (folder / "graphrt.json").write_text(json.dumps(record))
    [changed] = models.checks()
    assert changed.state == "optional" and "SHA-256" in changed.detail and changed.fix == f"rm -r {folder}"
    (folder / "graphrt.json").unlink()
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(size - 1)
    [cut] = models.checks()
    assert cut.state == "optional" and cut.detail.startswith("broken: ")
