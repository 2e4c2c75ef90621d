import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import graphrt.kernels.cpu
from graphrt.kernels.cpu.elementwise import silu_mul
from graphrt.kernels.cpu.linear import linear, pack_linear
from graphrt.kernels.cpu.slab import Slabs
from graphrt.kernels.cpu.team import set_threads, shared_team

rng = np.random.default_rng()


@pytest.fixture(autouse=True)
def restored():
    before = shared_team().threads
    yield
    set_threads(before)


def test_python_threads_take_turns_while_the_team_changes():
    w = pack_linear(rng.standard_normal((300, 64), dtype=np.float32))
    xs = [rng.standard_normal((20, 64), dtype=np.float32) for _ in range(4)]
    wants = []
    for x in xs:
        wants.append(np.empty((20, 300), np.float32))
        linear(x, w, None, wants[-1])
    wrong, stop = [], threading.Event()

    def work(x, want):
        out, gate = np.empty_like(want), np.empty((20, 32), np.float32)
        while not stop.is_set():
            out.fill(np.nan)
            linear(x, w, None, out)
            silu_mul(x, gate)
            if out.tobytes() != want.tobytes():
                wrong.append(threading.get_ident())

    people = [threading.Thread(target=work, args=pair) for pair in zip(xs, wants, strict=True)]
    for one in people:
        one.start()
    for n in [1, 2, 3, 7] * 5:
        set_threads(n)
    stop.set()
    for one in people:
        one.join(60)
        assert not one.is_alive()
    assert not wrong


def test_workers_sleep_and_wake():
    set_threads(3)
    w = pack_linear(np.ones((4096, 64), np.float32))
    x, out = np.ones((2, 64), np.float32), np.empty((2, 4096), np.float32)
    for pause in (0, 1e-4, 2e-4, 5e-3) * 25:
        threading.Event().wait(pause)
        out.fill(np.nan)
        linear(x, w, None, out)
        assert (out == 64).all()


def test_replaced_teams_end_their_threads():
    for n in (4, 2, 3):
        set_threads(n)
        assert sum(thread.name.startswith("kernel-") for thread in threading.enumerate()) == n - 1


@pytest.mark.parametrize("n", [0, -1, 257])
def test_thread_counts_out_of_range(n):
    with pytest.raises(ValueError, match=f"threads: want 1 to 256, have {n}"):
        set_threads(n)


def test_slabs_do_not_overlap_and_are_aligned():
    slabs = Slabs()
    arrays = [slabs.take((int(n), 3), np.dtype(np.float32)) for n in rng.integers(1, 9000, 50)]
    arrays.append(slabs.take((40 << 20,), np.dtype(np.uint8)))
    arrays.append(slabs.take((5,), np.dtype(np.uint16)))
    for i, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous
        array.fill(i % 250)
    assert all((array == i % 250).all() for i, array in enumerate(arrays))


def python(code, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


USE = """
import numpy as np
from graphrt.kernels.cpu.linear import linear, pack_linear
def use():
    out = np.empty((3, 4096), np.float32)
    linear(np.ones((3, 64), np.float32), pack_linear(np.ones((4096, 64), np.float32)), None, out)
    assert (out == 64).all()
"""


def test_a_forked_child_can_compute():
    code = (
        USE
        + """
import os
from graphrt.kernels.cpu.team import set_threads
set_threads(2)
use()
child = os.fork()
if child == 0:
    use()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
use()
"""
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_process_ends_while_workers_wait():
    done = python(USE + "from graphrt.kernels.cpu.team import set_threads\nset_threads(4)\nuse()")
    assert done.returncode == 0, done.stderr


TIMED = """
import time
from graphrt.kernels.cpu.elementwise import silu_mul
import numpy as np, graphrt.kernels.cpu.elementwise as e, graphrt.kernels.cpu.team as t
silu_mul(np.ones((1, 32), np.float32), np.empty((1, 16), np.float32))
stats = [f.stats for f in (*t._compiled(), e._compiled()[2])]
print(sum(sum(s.cache_hits.values()) for s in stats), sum(sum(s.cache_misses.values()) for s in stats), e.__file__)
"""


def test_a_read_only_package_is_cached_elsewhere_and_stamped(tmp_path):
    package = tmp_path / "site" / "graphrt"
    home, source = tmp_path / "home", Path(graphrt.kernels.cpu.__file__).parent
    (package / "kernels").mkdir(parents=True)
    home.mkdir()
    for file in (package / "__init__.py", package / "kernels" / "__init__.py"):
        file.touch()
    shutil.copytree(source, package / "kernels" / "cpu", ignore=shutil.ignore_patterns("__pycache__"))
    # A file in place of the cache directory keeps even root from writing there.
    (package / "kernels" / "cpu" / "__pycache__").touch()
    place = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    results = []
    for change in (None, None, "memory.py"):
        if change:  # an edit in a file that silu_mul's own file only imports
            with open(package / "kernels" / "cpu" / change, "a") as file:
                file.write("\n# edited\n")
        done = python(TIMED, cwd=tmp_path, **place)
        assert done.returncode == 0, done.stderr
        hits, misses, file = done.stdout.split()
        assert file.startswith(str(package))
        results.append((int(hits), int(misses)))
    assert results == [(0, 6), (6, 0), (0, 6)]
    assert any(home.rglob("*.nbi"))
