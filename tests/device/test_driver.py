"""What the backend asks of a device: memory, launches, library products, captures and their edges, errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from graphrt.errors import DeviceError
from graphrt.kernels.array import Array
from graphrt.kernels.cuda.driver import Driver, KernelCall
from graphrt.kernels.cuda.fill import fill_bell
from graphrt.kernels.cuda.jit import KernelSpec
from graphrt.kernels.cuda.probe import read_all

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def put(driver: Driver, values: np.ndarray) -> Array:
    array = driver.alloc(values.shape, values.dtype)
    driver.upload(array, values)
    return array


def test_memory_is_zeroed_and_unreadable(driver: Driver, rng: np.random.Generator) -> None:
    for _ in range(3):  # what was freed comes again
        array = driver.alloc((37, 5), np.float32)
        assert not driver.download(array).any()
        values = rng.standard_normal((37, 5), dtype=np.float32)
        driver.upload(array, values)
        assert np.array_equal(driver.download(array), values)
        assert np.array_equal(driver.download(array[3:9]), values[3:9])
        assert np.array_equal(driver.download(array[2:20, 1:4]), values[2:20, 1:4]), "strided"
        with pytest.raises(TypeError, match="device memory"):
            array.np  # noqa: B018
    with pytest.raises(DeviceError, match="upload"):
        driver.upload(array, values.astype(np.float64))


def test_too_much_memory(driver: Driver) -> None:
    free = driver.free_memory()
    with pytest.raises(DeviceError, match="not enough GPU memory"):
        driver.alloc((free + (1 << 30),), np.uint8)
    array = driver.alloc((1 << 24,), np.uint8)
    assert free - driver.free_memory() >= 1 << 24
    del array
    assert free - driver.free_memory() < 1 << 24


def test_kernels_write_mapped_memory(driver: Driver) -> None:
    mapped = driver.alloc_mapped((1000,), np.float32)
    assert not mapped.np.any()
    mapped.np[:] = np.nan
    device = driver.alloc((1000,), np.float32)
    for out in (mapped, device):
        driver.launch(fill_bell(driver, out, 7, 2.0))
    driver.synchronize()
    assert np.array_equal(mapped.np, driver.download(device))
    assert 1 < mapped.np.std() < 3


def test_kernels_read_mapped_memory(driver: Driver, rng: np.random.Generator) -> None:
    """Each replay sees what the host wrote before it was launched."""
    mapped, out = driver.alloc_mapped((64, 4), np.uint32), driver.alloc((1,), np.uint32)
    graph = driver.capture(lambda: driver.launch(read_all(driver, mapped, out, 2)))
    want = 0
    for _ in range(5):
        mapped.np[:] = rng.integers(0, 1 << 32, (64, 4), dtype=np.uint32)
        graph.launch()
        driver.synchronize()
        want += int(np.bitwise_xor.reduce(mapped.np, axis=1).sum(dtype=np.uint64))
        assert driver.download(out)[0] == want & 0xFFFFFFFF


def test_a_capture_runs_nothing_and_replays_in_order(driver: Driver) -> None:
    a, b = driver.alloc((4096,), np.float32), driver.alloc((4096,), np.float32)
    total = driver.alloc((1,), np.uint32)
    calls = [fill_bell(driver, a, 1, 1.0), fill_bell(driver, a, 2, 1.0), read_all(driver, a, total, 2)]
    driver.prepare({c.spec for c in calls})
    graph = driver.capture(lambda: [driver.launch(c) for c in calls])  # type: ignore[arg-type,return-value]
    driver.synchronize()
    assert not driver.download(a).any() and not driver.download(total).any()
    driver.launch(fill_bell(driver, b, 2, 1.0))
    once = np.bitwise_xor.reduce(driver.download(b).view(np.uint32).reshape(-1, 4), axis=1).sum(dtype=np.uint32)
    for n in range(1, 21):
        graph.launch()
        assert driver.download(total)[0] == np.uint32(n * int(once) & 0xFFFFFFFF)
    assert np.array_equal(driver.download(a), driver.download(b))


@pytest.mark.parametrize("pdl", [True, False])
def test_edges_are_what_was_declared(driver: Driver, pdl: bool) -> None:
    out = driver.alloc((256,), np.float32)
    call = fill_bell(driver, out, 1, 1.0)
    call = KernelCall(call.spec, call.grid, call.block, call.args, pdl=pdl)

    def record() -> None:
        for _ in range(9):
            driver.launch(call)

    graph = driver.capture(record)
    assert graph.nodes == 9
    assert (graph.programmatic_edges, graph.plain_edges) == ((8, 0) if pdl else (0, 8))
    assert "fill_bell" in graph.dot()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), [(65, 40, 48), (128, 256, 512), (3, 7, 33), (300, 1000, 96)])
def test_library_products(
    driver: Driver, rng: np.random.Generator, rows: int, n: int, k: int, accumulate: bool
) -> None:
    """Weights padded as the loader pads them, and the product of a slice; captured and not."""
    padded = np.zeros((n + -n % 8, k + -k % 32), BF16)
    padded[:n, :k] = rng.standard_normal((n, k)).astype(BF16)
    values, before = rng.standard_normal((rows, k)).astype(BF16), rng.standard_normal((rows, n), dtype=np.float32)
    w, x, out = put(driver, padded)[:n, :k], put(driver, values), put(driver, before)
    want = values.astype(np.float64) @ padded[:n, :k].astype(np.float64).T + (before if accumulate else 0)
    bound = 1e-5 * np.sqrt(k) * np.abs(want).max()
    driver.matmul(x, w, out, accumulate)
    assert np.abs(driver.download(out) - want).max() < bound
    free = driver.free_memory()
    graph = driver.capture(lambda: driver.matmul(x, w, out, accumulate))
    first = None
    for _ in range(10):
        driver.upload(out, before)
        graph.launch()
        got = driver.download(out)
        assert np.abs(got - want).max() < bound
        first = got if first is None else first
        assert np.array_equal(got, first)
    assert free - driver.free_memory() < 1 << 20, "a replay takes no memory"


def test_a_product_between_kernels_keeps_its_order(driver: Driver) -> None:
    """The kernel after a product may start early, but must not read before the product is complete."""
    x, w = driver.alloc((64, 512), BF16), driver.alloc((512, 512), BF16)
    out, total = driver.alloc((64, 512), np.float32), driver.alloc((1,), np.uint32)
    driver.matmul(x, w, out, False)

    def record() -> None:
        driver.launch(fill_bell(driver, x, 3, 1.0))
        driver.launch(fill_bell(driver, w, 4, 1.0))
        driver.matmul(x, w, out, False)
        driver.launch(read_all(driver, out, total, 2))

    graph = driver.capture(record)
    sums = set()
    for _ in range(50):
        driver.upload(total, np.zeros(1, np.uint32))
        driver.upload(out, np.full((64, 512), np.nan, np.float32))
        graph.launch()
        sums.add(int(driver.download(total)[0]))
        want = driver.download(x).astype(np.float64) @ driver.download(w).astype(np.float64).T
        assert np.abs(driver.download(out) - want).max() < 1e-2
    assert len(sums) == 1


def test_bad_launches_are_named(driver: Driver) -> None:
    out = driver.alloc((256,), np.float32)
    good = fill_bell(driver, out, 1, 1.0)
    for bad, why in (
        (KernelCall(good.spec, good.grid, (2048, 1, 1), good.args), "2048 threads"),
        (KernelCall(good.spec, (0, 1, 1), good.block, good.args), "grid is empty"),
        (KernelCall(good.spec, (9, 1, 1), good.block, good.args, cluster=2), "clusters of 2"),
        (KernelCall(good.spec, good.grid, good.block, good.args, smem=1 << 20), "shared memory"),
        (KernelCall(good.spec, good.grid, good.block, (3, *good.args[1:])), "arguments of type int"),  # type: ignore[arg-type]
    ):
        with pytest.raises(DeviceError, match=f"fill_bell.*{why}"):
            driver.launch(bad)
    driver.launch(good)
    driver.synchronize()
    driver.poll()


def test_an_unknown_kernel_is_named(driver: Driver) -> None:
    spec = KernelSpec.of("fill.cu", "nothing", bits=16)
    with pytest.raises(DeviceError, match="nothing"):
        driver.launch(KernelCall(spec, (1, 1, 1), (32, 1, 1), ()))


def test_nothing_is_allocated_inside_a_capture(driver: Driver) -> None:
    with pytest.raises(DeviceError, match="inside a capture"):
        driver.capture(lambda: driver.alloc((4,), np.float32))  # type: ignore[arg-type,return-value]
    out = driver.alloc((256,), np.float32)
    graph = driver.capture(lambda: driver.launch(fill_bell(driver, out, 1, 1.0)))  # the next one works
    assert graph.nodes == 1


def test_arguments_live_as_long_as_the_graph(driver: Driver) -> None:
    total, temporary = driver.alloc((1,), np.uint32), [driver.alloc((1 << 20,), np.uint32)]
    # The only reference to the array that is left afterwards is the graph's.
    graph = driver.capture(lambda: driver.launch(read_all(driver, temporary.pop(), total, 2)))
    others = [driver.alloc((1 << 20,), np.uint32) for _ in range(4)]
    for other in others:
        driver.upload(other, np.arange(1 << 20, dtype=np.uint32))
    graph.launch()
    assert driver.download(total)[0] == 0
