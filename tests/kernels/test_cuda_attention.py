"""The attention kernels' twins beside the NumPy operation, and what the call builders promise."""

from __future__ import annotations

import numpy as np
import pytest
from attention_case import BF16, Case, OnDevice, Shape, decode_rows

from graphrt.kernels.array import host_array
from graphrt.kernels.cuda import attention, attention_decode, attention_prefill
from graphrt.kernels.cuda.attention_decode import choose
from graphrt.kernels.cuda.attention_twin import attend
from graphrt.kernels.cuda.fake_driver import FakeDriver
from graphrt.kernels.numpy_ops import NumpyOps
from graphrt.kernels.step_state import StepView


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.mark.parametrize("shape", [Shape(8, 4, 64, 32), Shape(2, 1, 80, 16), Shape(1, 7, 128, 64)], ids=str)
def test_twin_is_the_numpy_operation(rng: np.random.Generator, shape: Shape) -> None:
    lengths = [int(n) for n in rng.integers(0, 200, 6)] + [1, shape.block_tokens, shape.block_tokens + 1]
    case = Case(rng, shape, decode_rows(lengths))
    got = np.full(case.q.shape, np.nan, BF16)
    attend(case.q, case.cache[:, case.layer], case.block_table, case.row_slot, case.positions, case.scale, got)
    case.check(got)

    class Step:
        block_table, row_slot, positions = map(host_array, (case.block_table, case.row_slot, case.positions))

    step: StepView = Step()  # type: ignore[assignment]
    q, cache = host_array(case.q.astype(np.float32)), host_array(case.cache.astype(np.float32))
    want = np.full(case.q.shape, np.nan, np.float32)
    NumpyOps().paged_attention(q, step, cache, case.layer, case.scale, host_array(want))
    assert np.array_equal(got == 0, want == 0)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64, 256, 1000])
@pytest.mark.parametrize(
    ("kv_heads", "group", "e"), [(8, 4, 64), (8, 4, 128), (3, 3, 64), (1, 16, 128), (32, 1, 80), (2, 8, 16)]
)
def test_a_launch_fits_any_card(rows: int, kv_heads: int, group: int, e: int) -> None:
    """Workers fill the card but for a cluster, blocks leave room for their neighbours, the workspace is what the call asks for."""
    for sms in (24, 132, 148):
        t = choose(rows, kv_heads, group, e, sms)
        per_sm = 2 if t.cluster == 1 and rows * kv_heads > sms else 1
        assert t.slots >= 2 and t.workers >= 1 and t.workers * t.cluster <= max(per_sm * sms, t.cluster)
        assert t.smem(rows, group, e) <= attention_decode.SMEM // per_sm or t.slots == 2
        assert t.smem(min(rows, 256), group, e) <= 99 * 1024
        if rows > 1:
            assert t.workers * t.cluster > sms - t.cluster


def test_workspace_is_exactly_enough(rng: np.random.Generator) -> None:
    driver = FakeDriver()
    case = Case(rng, Shape(8, 4, 64, 32), decode_rows([40, 0, 7]))
    on = OnDevice(driver, case)
    words = attention_decode.attention_decode_workspace(3, 32, 8, 64, driver.sm_count)
    args = (driver, on.q, on.step, on.cache, case.layer, case.scale, on.out)
    attention_decode.attention_decode_call(*args, driver.alloc((words,), np.uint32))
    with pytest.raises(ValueError, match=f"need {words}"):
        attention_decode.attention_decode_call(*args, driver.alloc((words - 1,), np.uint32))


@pytest.mark.parametrize("rows", [1, 9, 64, 65, 500, 2048, 8192])
@pytest.mark.parametrize(("kv_heads", "group", "e"), [(8, 4, 64), (8, 4, 128), (3, 3, 64), (1, 16, 128), (32, 1, 80)])
def test_a_prompt_fills_the_card_and_fits(rows: int, kv_heads: int, group: int, e: int) -> None:
    for sms in (24, 132, 148):
        t = attention_prefill.choose(rows, kv_heads, group, sms)
        assert t.smem(group, e) <= attention_decode.SMEM
        blocks = t.tiles(rows, group) * kv_heads
        assert t.tiles(rows, group) * (t.tile_m // group) >= rows
        assert blocks >= sms or t.shares * blocks > sms or t.shares == attention_prefill.MAX_SHARES
        assert t.words(rows, kv_heads, group, e) * 4 <= 64 << 20


@pytest.mark.parametrize("kind", ["decode", "prefill", "score"])
def test_the_kind_of_the_step_decides(rng: np.random.Generator, kind: str) -> None:
    driver = FakeDriver()
    case = Case(rng, Shape(8, 4, 64, 32), decode_rows([40, 0, 7]))
    on = OnDevice(driver, case)
    on.step.kind = kind
    words = attention.workspace_words(on.step.kind, 3, 32, 8, 64, driver.sm_count)
    space = driver.alloc((words,), np.uint32)
    call = attention.paged_attention(driver, on.q, on.step, on.cache, case.layer, case.scale, on.out, space)
    assert call.spec.entry == ("attention_decode" if kind == "decode" else "attention_prefill")
    driver.launch(call)
    case.check(driver.download(on.out))
    assert attention.fits(32, 8, 64, 32) and not attention.fits(32, 5, 64, 32) and not attention.fits(34, 2, 64, 32)
    assert not attention.fits(8, 8, 136, 32) and not attention.fits(8, 8, 64, 24)
