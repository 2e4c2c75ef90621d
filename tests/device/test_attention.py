"""Attention over the paged cache beside an independent float64 reference: fresh random inputs, everything else poisoned."""

from __future__ import annotations

import numpy as np
import pytest
from attention_case import BF16, Case, OnDevice, Row, Shape, decode_rows
from numpy.typing import NDArray

from graphrt.kernels import abi
from graphrt.kernels.array import Array
from graphrt.kernels.cuda import attention_decode, attention_prefill, elementwise
from graphrt.kernels.cuda.attention_decode import DecodeTuning
from graphrt.kernels.cuda.attention_prefill import PrefillTuning
from graphrt.kernels.cuda.checks import F32
from graphrt.kernels.cuda.driver import Driver, KernelCall

LLAMA_1B = Shape(8, 4, 64, 32)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def workspace(driver: Driver, rows: int, shape: Shape) -> Array:
    """Counters at zero, the rest poisoned: nothing may be read there before it is written."""
    words = attention_decode.attention_decode_workspace(
        rows, shape.heads, shape.kv_heads, shape.head_dim, driver.sm_count
    )
    array = driver.alloc((words,), np.uint32)
    parts = array[attention_decode.MAX_PAIRS :]
    driver.upload(parts, np.full(parts.shape, 0x7FC00000, np.uint32))
    return array


def decode_call(driver: Driver, case: Case, on: OnDevice, tuning: DecodeTuning | None = None) -> KernelCall:
    space = workspace(driver, len(case.rows), case.shape)
    call = attention_decode.attention_decode_call(
        driver, on.q, on.step, on.cache, case.layer, case.scale, on.out, space, tuning
    )
    driver.prepare([call.spec])
    return call


def prefill_call(driver: Driver, case: Case, on: OnDevice, tuning: PrefillTuning | None = None) -> KernelCall:
    s, rows = case.shape, len(case.rows)
    tuning = tuning or attention_prefill.choose(rows, s.kv_heads, s.group, driver.sm_count)
    words = attention_prefill.MAX_PAIRS + tuning.words(rows, s.kv_heads, s.group, s.head_dim)
    space = driver.alloc((words,), np.uint32)
    parts = space[attention_prefill.MAX_PAIRS :]
    driver.upload(parts, np.full(parts.shape, 0x7FC00000, np.uint32))
    call = attention_prefill.attention_prefill_call(
        driver, on.q, on.step, on.cache, case.layer, case.scale, on.out, space, tuning
    )
    driver.prepare([call.spec])
    return call


def prefill(driver: Driver, case: Case, tuning: PrefillTuning | None = None) -> NDArray[np.float32]:
    on = OnDevice(driver, case)
    return run(driver, prefill_call(driver, case, on, tuning), on.out)


def run(driver: Driver, call: KernelCall, out: Array) -> NDArray[np.float32]:
    driver.upload(out, np.full(out.shape, np.nan, BF16))
    driver.launch(call)
    return driver.download(out)


def decode(driver: Driver, case: Case) -> NDArray[np.float32]:
    on = OnDevice(driver, case)
    return run(driver, decode_call(driver, case, on), on.out)


SHAPES = [
    LLAMA_1B,
    Shape(8, 4, 128, 32),
    Shape(3, 3, 64, 16),
    Shape(1, 1, 80, 16),
    Shape(2, 4, 96, 64),
    Shape(1, 7, 128, 32),
    Shape(2, 8, 128, 16),
    Shape(1, 16, 128, 32),
    Shape(2, 12, 64, 32),
    Shape(2, 5, 112, 16),
    Shape(2, 2, 32, 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_decode(driver: Driver, rng: np.random.Generator, shape: Shape, rows: int) -> None:
    """Lengths at the borders of blocks, chunks and rounds, and random ones; padding rows between them."""
    t = shape.block_tokens
    borders = [0, 1, t - 1, t, t + 1, 15, 16, 17, 511, 512, 513, 2047]
    lengths = [int(n) for n in rng.permutation(borders + [int(n) for n in rng.integers(1, 700, 40)])[:rows]]
    case = Case(rng, shape, decode_rows(lengths))
    case.check(decode(driver, case))


@pytest.mark.parametrize("length", [4097, 8192, 33000])
def test_one_long_row(driver: Driver, rng: np.random.Generator, length: int) -> None:
    case = Case(rng, Shape(2, 4, 64, 32), decode_rows([length]), layers=1)
    case.check(decode(driver, case))


@pytest.mark.parametrize("rows", [3, 70, 300])
def test_one_long_row_among_short_ones(driver: Driver, rng: np.random.Generator, rows: int) -> None:
    lengths = [int(n) for n in rng.integers(0, 40, rows)]
    lengths[int(rng.integers(rows))] = 9001
    case = Case(rng, Shape(2, 4, 64, 16), decode_rows(lengths), layers=1)
    case.check(decode(driver, case))


def test_only_padding(driver: Driver, rng: np.random.Generator) -> None:
    case = Case(rng, LLAMA_1B, decode_rows([0, 0, 0]))
    assert not decode(driver, case).any()


def test_rows_of_one_sequence(driver: Driver, rng: np.random.Generator) -> None:
    """Several tokens of a sequence in one step: none sees those after it."""
    case = Case(rng, LLAMA_1B, [(0, 99), (1, 5), (0, 100), None, (0, 101)])
    case.check(decode(driver, case))


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("warps", [4, 8])
def test_every_way_to_cut(driver: Driver, rng: np.random.Generator, cluster: int, warps: int) -> None:
    """Workers from one block to eight, rings of an even and of an odd number of slots, with splits that meet in memory."""
    case = Case(rng, Shape(2, 4, 64, 16), decode_rows([1, 3000, 0, 700, 17]), layers=1)
    on = OnDevice(driver, case)
    for slots in (2, 3):
        tuning = DecodeTuning(cluster, warps, slots, workers=5, min_tiles=1, max_splits=4)
        case.check(run(driver, decode_call(driver, case, on, tuning), on.out))


def test_bits_repeat_and_do_not_depend_on_the_batch(driver: Driver, rng: np.random.Generator) -> None:
    """The same row gives the same bits at any place of the batch and beside any other rows, and every time."""
    lengths = [700, 1, 0, 5000, 2048, 33, 512, 1300]
    case = Case(rng, LLAMA_1B, decode_rows(lengths), layers=1)
    on = OnDevice(driver, case)
    call = decode_call(driver, case, on)
    first = run(driver, call, on.out)
    for _ in range(200 if driver.name != "fake" else 2):
        assert run(driver, call, on.out).tobytes() == first.tobytes()
    order = rng.permutation(len(lengths))
    for array, values in ((on.q, case.q), (on.step.row_slot, case.row_slot), (on.step.positions, case.positions)):
        driver.upload(array, values[order])
    assert run(driver, call, on.out).tobytes() == first[order].tobytes()
    alone = np.where(case.row_slot[order] == case.row_slot[3], case.row_slot[order], abi.PAD).astype(np.int32)
    driver.upload(on.step.row_slot, alone)
    got = run(driver, call, on.out)
    assert got[order == 3].tobytes() == first[3:4].tobytes() and not got[order != 3].any()


def test_rows_that_the_predecessor_writes(driver: Driver, rng: np.random.Generator) -> None:
    """One graph serves all lengths, and the rows that count are those that the kernel before has just written."""
    case = Case(rng, LLAMA_1B, decode_rows([900, 1, 40, 0, 3000, 17, 5, 256]), layers=1)
    on = OnDevice(driver, case)
    call = decode_call(driver, case, on)
    ids = driver.alloc((1,), np.int32)
    news, calls = [], []
    for array in (on.step.row_slot, on.step.positions):
        row = Array(array.ptr, (1, *array.shape), F32, (4 * array.shape[0], 4), array.owner)  # the same bits
        new = driver.alloc(row.shape, np.float32)
        news.append(new)
        calls.append(elementwise.gather_rows(new, ids, row))
    driver.prepare([c.spec for c in calls])
    graph = driver.capture(lambda: [driver.launch(c) for c in (*calls, call)] and None)
    for _ in range(20 if driver.name != "fake" else 3):
        lengths = [
            0 if n == 0 else int(rng.integers(1, n + 1)) for n in rng.permuted([900, 1, 40, 0, 3000, 17, 5, 256])
        ]
        keep = [i for i, n in enumerate([900, 1, 40, 0, 3000, 17, 5, 256]) if n]
        rows = [None if n == 0 else (int(rng.choice(keep)), 0) for n in lengths]
        case.rows = [None if r is None else (r[0], int(rng.integers(case.kv[r[0]].shape[2]))) for r in rows]
        case.row_slot = np.array([abi.PAD if r is None else case.slot_of[r[0]] for r in case.rows], np.int32)
        case.positions = np.array([-7 if r is None else r[1] for r in case.rows], np.int32)
        case.q = np.where((case.row_slot == abi.PAD)[:, None, None], np.nan, rng.standard_normal(case.q.shape)).astype(
            BF16
        )
        driver.upload(on.q, case.q)
        driver.upload(on.out, np.full(on.out.shape, np.nan, BF16))
        for new, values in zip(news, (case.row_slot, case.positions), strict=True):
            driver.upload(new, values.view(np.float32)[None])
        graph.launch()
        driver.synchronize()
        case.check(driver.download(on.out))


def test_what_does_not_fit_is_refused(driver: Driver, rng: np.random.Generator) -> None:
    case = Case(rng, LLAMA_1B, decode_rows([3]))
    on = OnDevice(driver, case)
    space = workspace(driver, 1, case.shape)
    args = (driver, on.q, on.step, on.cache, 0, 1.0, on.out)
    with pytest.raises(ValueError, match="workspace"):
        attention_decode.attention_decode_call(*args, space[:100])
    with pytest.raises(ValueError, match="multiple of 16"):
        attention_decode.attention_decode_spec(4, 40, 32, attention_decode.choose(1, 8, 4, 64, 132))


def chunks(*parts: tuple[int, int, int]) -> list[Row]:
    """Rows begin .. end - 1 of each (sequence, begin, end); sequence -1 for padding."""
    return [None if s < 0 else (s, p) for s, begin, end in parts for p in range(begin, end)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tuning", [PrefillTuning(128, 1), PrefillTuning(64, 1), PrefillTuning(64, 3)], ids=str)
def test_prefill(driver: Driver, rng: np.random.Generator, shape: Shape, tuning: PrefillTuning) -> None:
    """Chunks that begin and end anywhere, several in a tile, padding at the end and in between."""
    n, m = int(rng.integers(1, 60)), int(rng.integers(1, 300))
    rows = chunks((0, m, m + n), (1, 0, 3), (2, 0, 1), (-1, 0, 2), (3, 130, 131), (4, 0, 40), (-1, 0, 5))
    case = Case(rng, shape, rows)
    case.check(prefill(driver, case, tuning))


@pytest.mark.parametrize("tile_m", [64, 128])
def test_prefill_in_any_order(driver: Driver, rng: np.random.Generator, tile_m: int) -> None:
    """Rows of all sequences and positions shuffled: slower, but right."""
    rows = chunks((0, 60, 90), (1, 0, 20), (2, 5, 6), (-1, 0, 7), (3, 0, 33))
    case = Case(rng, Shape(2, 4, 64, 16), [rows[i] for i in rng.permutation(len(rows))])
    case.check(prefill(driver, case, PrefillTuning(tile_m, 1)))


@pytest.mark.parametrize("begin", [0, 5000])
def test_prefill_of_a_long_prompt(driver: Driver, rng: np.random.Generator, begin: int) -> None:
    """A chunk as the engine cuts it, with the choice that it makes; few rows of many keys are shared among blocks."""
    case = Case(rng, Shape(2, 4, 64, 32), chunks((0, begin, begin + 130), (-1, 0, 6)), layers=1)
    on = OnDevice(driver, case)
    call = prefill_call(driver, case, on)
    first = run(driver, call, on.out)
    case.check(first)
    for _ in range(50 if driver.name != "fake" else 2):
        assert run(driver, call, on.out).tobytes() == first.tobytes()


def test_prefill_of_only_padding(driver: Driver, rng: np.random.Generator) -> None:
    case = Case(rng, LLAMA_1B, [None] * 70)
    assert not prefill(driver, case).any() and not prefill(driver, case, PrefillTuning(64, 4)).any()


def test_the_two_kernels_share_a_workspace(driver: Driver, rng: np.random.Generator) -> None:
    """Whatever one leaves behind does not disturb the other."""
    short = Case(rng, LLAMA_1B, decode_rows([5000, 1, 0, 3000]), layers=1)
    long = Case(rng, LLAMA_1B, chunks((0, 4000, 4040)), layers=1)
    tuning = PrefillTuning(64, 4)
    words = max(
        attention_decode.attention_decode_workspace(4, 32, 8, 64, driver.sm_count),
        attention_prefill.MAX_PAIRS + tuning.words(40, 8, 4, 64),
    )
    space = driver.alloc((words,), np.uint32)
    for case in (short, long, short, long):
        on = OnDevice(driver, case)
        args = (driver, on.q, on.step, on.cache, case.layer, case.scale, on.out, space)
        if case is short:
            call = attention_decode.attention_decode_call(*args)
        else:
            call = attention_prefill.attention_prefill_call(*args, tuning)
        driver.prepare([call.spec])
        case.check(run(driver, call, on.out))
        assert not driver.download(space[: attention_decode.MAX_PAIRS]).any()
