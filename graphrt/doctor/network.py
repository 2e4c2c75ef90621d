"""What KV sharing between hosts would use: RDMA devices, pyverbs and Redis."""

from __future__ import annotations

import importlib
import re
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

from graphrt.doctor.check import Check

_DEBIAN_PACKAGES = Path("/usr/lib/python3/dist-packages")


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> Check:
    """The RDMA devices that the kernel offers, with the state of their first port."""
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not names:
        return Check("RDMA", "optional", "no device; one host needs none")
    return Check("RDMA", "ok", ", ".join(f"{name} ({_port_state(root / name)})" for name in names))


def pyverbs(packages: Path = _DEBIAN_PACKAGES) -> Check:
    """pyverbs is compiled for one minor version of Python, in Debian the system's."""
    try:
        importlib.import_module("pyverbs.device")
    except ImportError:
        pass
    else:
        return Check("pyverbs", "ok", "loads")
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    built = _built_for(packages / "pyverbs")
    if not built:
        return Check("pyverbs", "optional", "not installed", "apt-get install python3-pyverbs")
    if mine not in built:
        detail = f"{packages}/pyverbs is built for Python {', '.join(built)}, this is {mine}"
        return Check("pyverbs", "optional", detail, f"make clean install PYTHON=python{built[0]}")
    return Check(
        "pyverbs",
        "optional",
        f"installed for Python {mine} in {packages}, which this environment does not see",
        f"ln -s {packages}/pyverbs {sysconfig.get_path('platlib')}/",
    )


def redis(host: str = "localhost", port: int = 6379) -> Check:
    """A Redis that answers, or a binary that could be started."""
    try:
        with socket.create_connection((host, port), timeout=0.5) as connection:
            connection.settimeout(0.5)
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
        if answer.startswith((b"+PONG", b"-NOAUTH")):
            return Check("Redis", "ok", f"answers at {host}:{port}")
        return Check("Redis", "optional", f"something other than Redis answers at {host}:{port}", "set another port")
    except OSError:
        pass
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary:
        return Check("Redis", "optional", f"{binary} is not running", binary)
    return Check("Redis", "optional", "not installed; one host needs none", "apt-get install redis-server")


def _port_state(device: Path) -> str:
    for state in sorted(device.glob("ports/*/state")):
        return state.read_text().split(":")[-1].strip().lower()
    return "no port"


def _built_for(package: Path) -> list[str]:
    """The Python versions that the compiled modules in `package` carry in their names, as "3.11"."""
    versions = {
        f"{found[1]}.{found[2]}"
        for path in (package.glob("*.so") if package.is_dir() else ())
        if (found := re.search(r"\.cpython-(\d)(\d+)-", path.name))
    }
    return sorted(versions)
