"""The threads that share a kernel's work: one caller and some workers, meeting in a control block of shared memory.

Why not numba's own `prange`: its portable layer puts every thread to sleep between kernels (140 us a launch measured on a
two-core virtual machine, and a decode step has 150 launches), its quick layer needs a system library that slim images lack,
and the portable one aborts the process when two Python threads enter it. Here a launch costs a few microseconds, because
workers spin for a short while before they sleep, and because the caller never waits for a worker that has not begun: it takes
items too, and a worker that wakes late finds the job closed.

Work is handed out item by item, so results must not depend on who computes what; each kernel keeps that promise.
"""

import os
import threading
import time
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from graphrt.kernels.cpu.jit import external, source_stamp
from graphrt.kernels.cpu.memory import (
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    atomic_swap,
    call_body,
    load_i64,
    relax,
    store_i64,
)
from graphrt.kernels.cpu.slab import Slabs, aligned_zeros

# Byte offsets in the control block; what different threads write lies on different cache lines.
STATE = 0  # job number << 16 | OPEN | workers inside
NEXT = 64  # the first item that nobody has taken
THREADS = 128
FUNCTION = 192
ARGS = 200  # 23 words for the kernel
WORKERS = 384  # per worker two lines: asleep flag, then a sem_t
WORKER_BYTES = 128
OPEN = 1 << 15
INSIDE = OPEN - 1

SPIN_SECONDS = 200e-6  # longer than the gap between two kernels of a step, shorter than what a neighbour would notice
MAX_THREADS = 256

_sem_init = external("sem_init", types.int32, types.int64, types.int32, types.int32)
_sem_post = external("sem_post", types.int32, types.int64)
_sem_wait = external("sem_wait", types.int32, types.int64)
_sched_yield = external("sched_yield", types.int32)


@njit
def take(control: int, items: int) -> tuple[int, int]:
    """The next run of items [first, last): large at the start, single at the end. first == items: none is left."""
    while True:
        first = atomic_load(control + NEXT)
        if first >= items:
            return items, items
        last = first + max(1, (items - first) // (2 * load_i64(control + THREADS)))
        if atomic_replace(control + NEXT, first, last):
            return first, last


@njit
def run(control: int, function: int, workers: int) -> None:
    """Run the job whose arguments lie at control + ARGS on the caller and up to `workers` workers. Returns when it is done."""
    atomic_store(control + NEXT, 0)
    store_i64(control + THREADS, workers + 1)
    if workers == 0:
        call_body(function, control, 0)
        return
    store_i64(control + FUNCTION, function)
    publish(control, workers)
    call_body(function, control, 0)
    atomic_add(control + STATE, -OPEN)
    spun = 0
    while atomic_load(control + STATE) & INSIDE:
        relax()
        spun += 1
        if spun > 4096:  # a worker has lost its core in the middle of an item
            _sched_yield()


@njit
def publish(control: int, workers: int) -> None:
    """Open the next job and wake whoever sleeps. Only called while no job is open and no worker inside."""
    job = (atomic_load(control + STATE) >> 16) + 1
    atomic_store(control + STATE, (job << 16) | OPEN)
    for worker in range(workers):
        mine = control + WORKERS + worker * WORKER_BYTES
        if atomic_load(mine) != 0 and atomic_swap(mine, 0) != 0:
            _sem_post(mine + 64)


@njit
def _serve(control: int, who: int, spins: int) -> None:
    """A worker's life: wait for an open job not seen yet, enter, work, leave. A job without a function ends it."""
    mine = control + WORKERS + (who - 1) * WORKER_BYTES
    seen = 0
    spun = 0
    while True:
        state = atomic_load(control + STATE)
        if not (state & OPEN) or (state >> 16) == seen:
            spun += 1
            if spun < spins:
                relax()
                continue
            spun = 0
            atomic_store(mine, 1)
            # Looked at again after the flag is up: a job published in between would wake nobody.
            state = atomic_load(control + STATE)
            if not (state & OPEN) or (state >> 16) == seen:
                _sem_wait(mine + 64)
            atomic_store(mine, 0)
            continue
        if not atomic_replace(control + STATE, state, state + 1):
            continue
        seen = state >> 16
        spun = 0
        function = load_i64(control + FUNCTION)
        if function == 0:
            atomic_add(control + STATE, -1)
            return
        call_body(function, control, who)
        atomic_add(control + STATE, -1)


@cache
def _compiled() -> tuple[Any, ...]:
    stamp = source_stamp()

    @njit("void(int64, int64, int64)", nogil=True, cache=True)
    def serve(control: int, who: int, spins: int) -> None:
        if stamp:
            _serve(control, who, spins)

    @njit("void(int64, int64)", nogil=True, cache=True)
    def prepare(control: int, workers: int) -> None:
        if stamp:
            for worker in range(workers):
                _sem_init(control + WORKERS + worker * WORKER_BYTES + 64, 0, 0)

    @njit("void(int64)", nogil=True, cache=True)
    def spin(count: int) -> None:
        if stamp:
            for _ in range(count):
                relax()

    @njit("void(int64, int64)", nogil=True, cache=True)
    def stop(control: int, workers: int) -> None:
        if stamp:
            store_i64(control + FUNCTION, 0)
            publish(control, workers)

    @njit("void(int64, int64, int64)", nogil=True, cache=True)
    def start(control: int, function: int, workers: int) -> None:
        if stamp:
            run(control, function, workers)

    return serve, prepare, spin, stop, start


class Team:
    """`threads` threads for kernels, the caller among them.

    Callers hold `lock` from writing a kernel's arguments to the end of the job, so any number of Python threads may share one
    team: they take turns. `scratch` is a private stretch of memory per thread.
    """

    SCRATCH = 1 << 19

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"threads: want 1 to {MAX_THREADS}, have {threads}")
        self.lock = threading.Lock()
        self.threads = threads
        self.workers = threads - 1
        self._control = aligned_zeros(WORKERS + threads * WORKER_BYTES)
        self._scratch = aligned_zeros(threads * self.SCRATCH)
        self._space = aligned_zeros(64)
        self.weights = Slabs()
        self.control: int = self._control.ctypes.data
        self.scratch: int = self._scratch.ctypes.data
        self._members: list[threading.Thread] = []
        serve, prepare, spin, *_ = _compiled()
        prepare(self.control, self.workers)
        began = time.perf_counter()
        spin(2000)
        spins = max(1, int(2000 * SPIN_SECONDS / max(time.perf_counter() - began, 1e-7)))
        for who in range(1, threads):
            member = threading.Thread(target=serve, args=(self.control, who, spins), name=f"kernel-{who}", daemon=True)
            member.start()
            self._members.append(member)

    def space(self, nbytes: int) -> np.ndarray:
        """Shared memory of at least `nbytes` (uint8) that lives until the next call; call it with the lock held."""
        if self._space.size < nbytes:
            self._space = aligned_zeros(nbytes + nbytes // 2)
        return self._space

    def run(self, function: int, *words: int) -> None:
        """Run a kernel body by its address with these arguments. For kernels that are not called in every step."""
        with self.lock:
            self._control.view(np.int64)[ARGS // 8 : ARGS // 8 + len(words)] = words
            _compiled()[4](self.control, function, self.workers)

    def close(self) -> None:
        """End the workers. The team itself goes on working, on the caller alone."""
        with self.lock:
            workers, self.workers = self.workers, 0
            if workers:
                _compiled()[3](self.control, workers)
                for member in self._members:
                    member.join()


# The one piece of state that this package keeps: a process has one set of cores, and two engines in one process must share
# it by turns instead of each spinning on all of them. The guard makes the choice of the team itself safe.
_guard = threading.Lock()
_shared: list[Team] = []


def shared_team() -> Team:
    """The process's team; made on first use, with a thread for each core that this process may run on."""
    if _shared:
        return _shared[0]
    return _replace(None)


def set_threads(n: int) -> None:
    """Use `n` threads for all kernels of this process from now on. Results never depend on it. ValueError outside 1..256."""
    if not 1 <= n <= MAX_THREADS:
        raise ValueError(f"threads: want 1 to {MAX_THREADS}, have {n}")
    _replace(n)


def _replace(n: int | None) -> Team:
    with _guard:
        if _shared and n in (None, _shared[0].threads):
            return _shared[0]
        team = Team(n or min(MAX_THREADS, len(os.sched_getaffinity(0))))
        old = _shared[:]
        if not old:
            os.register_at_fork(after_in_child=_forget)
        _shared[:] = [team]
    for one in old:
        one.close()
    return team


def _forget() -> None:
    """In a forked child the workers do not exist and a lock may be held for ever: start afresh."""
    global _guard
    _guard = threading.Lock()
    _shared.clear()
