"""How much memory this process may still take: the machine's, and its control group's."""

from __future__ import annotations

from pathlib import Path

from graphrt.errors import ModelError

_UNLIMITED = 1 << 60  # cgroup v1 spells "no limit" as a number near 2**63


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes: the smaller of MemAvailable and what each enclosing control group (v2 or v1) leaves."""
    best = _meminfo(proc / "meminfo")
    for group, names in _groups(proc / "self/cgroup", cgroups):
        limit = _number(group / names[0])
        used = _number(group / names[1])
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        # Clean file pages count as used but are given up under pressure.
        reclaimable = _stat(group / "memory.stat", names[2])
        best = min(best, max(0, limit - max(0, used - reclaimable)))
    return best


def check_memory(need: int, what: str, have: int | None = None) -> None:
    """ModelError when the `need` bytes of `what` are more than the `have` that there are; None asks this machine."""
    have = available_memory() if have is None else have
    if need > have:
        raise ModelError(f"not enough memory: {what} needs {size_text(need)}, {size_text(have)} are available")


def size_text(nbytes: int) -> str:
    """Bytes for people: in MiB below 1 GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 1 << 30 else f"{nbytes / 2**20:.2f} MiB"


def _meminfo(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return _UNLIMITED
    values = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
    for name in ("MemAvailable", "MemFree"):
        if values.get(name):
            return int(values[name][0]) * 1024
    return _UNLIMITED


def _groups(path: Path, root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """The control groups around this process, innermost first, with the names of limit, usage and reclaimable part."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's; what does not exist here is skipped, the root always counts.
        group = base / inside.strip("/")
        while group != base and base in group.parents:
            found.append((group, names))
            group = group.parent
        found.append((base, names))
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
