"""Available memory: the machine's figure, narrowed by control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphrt.errors import ModelError
from graphrt.memory import available_memory, size_text
from graphrt.weights import check_memory

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cg"


MEMINFO = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable:  {32 * GIB // 1024} kB\n"}


def test_machine_alone(tmp_path: Path) -> None:
    assert available_memory(*tree(tmp_path, MEMINFO)) == 32 * GIB


def test_v2_counts_every_enclosing_group_and_gives_back_the_page_cache(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/outer/inner\n",
        "cg/outer/inner/memory.max": "max\n",
        "cg/outer/inner/memory.current": "5\n",
        "cg/outer/memory.max": f"{8 * GIB}\n",
        "cg/outer/memory.current": f"{6 * GIB}\n",
        "cg/outer/memory.stat": f"anon 1\ninactive_file {1 * GIB}\n",
    }
    assert available_memory(*tree(tmp_path, files)) == 3 * GIB


def test_v2_in_a_container_sees_only_its_root(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "0::/system.slice/docker-abc.scope\n",
        "cg/memory.max": f"{2 * GIB}\n",
        "cg/memory.current": f"{GIB}\n",
    }
    assert available_memory(*tree(tmp_path, files)) == GIB


def test_v1(tmp_path: Path) -> None:
    files = MEMINFO | {
        "proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/job\n",
        "cg/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
        "cg/memory/job/memory.usage_in_bytes": f"{5 * GIB}\n",
        "cg/memory/job/memory.stat": f"total_inactive_file {2 * GIB}\n",
        "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cg/memory/memory.usage_in_bytes": "1\n",
    }
    assert available_memory(*tree(tmp_path, files)) == GIB


def test_more_used_than_allowed_is_zero(tmp_path: Path) -> None:
    files = MEMINFO | {"proc/self/cgroup": "0::/\n", "cg/memory.max": "100\n", "cg/memory.current": "200\n"}
    assert available_memory(*tree(tmp_path, files)) == 0


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 MiB"),
        (12_345_678, "11.77 MiB"),
        (GIB - 1, "1024.00 MiB"),
        (GIB, "1.00 GiB"),
        (3 * GIB // 2, "1.50 GiB"),
    ],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


def test_the_check_names_need_and_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory() > 1 << 20
    check_memory(1, "a byte")
    monkeypatch.setattr("graphrt.memory.available_memory", lambda: 3 * GIB)
    check_memory(3 * GIB, "just enough")
    with pytest.raises(ModelError, match=r"^not enough memory: the cache needs 4\.50 GiB, 3\.00 GiB are available$"):
        check_memory(9 * GIB // 2, "the cache")
