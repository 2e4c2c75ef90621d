import numpy as np
import pytest

from graphrt.kernels.cpu.attention import attention, kv_append
from graphrt.kernels.cpu.team import set_threads, shared_team

rng = np.random.default_rng()
LAYER = 1


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = shared_team().threads
    set_threads(request.param)
    yield request.param
    set_threads(before)


class Sequences:
    """A paged cache, NaN wherever no token was appended, with `lengths[s]` random tokens in slot s."""

    def __init__(self, heads, kv_heads, head_dim, tokens, lengths):
        self.heads, self.scale = heads, float(head_dim**-0.5)
        per_slot = -(-max(lengths) // tokens) + 1
        blocks = len(lengths) * per_slot + 3
        self.cache = np.full((blocks, 2, 2, kv_heads, tokens, head_dim), np.nan, np.float32)
        self.table = rng.permutation(blocks)[: len(lengths) * per_slot].reshape(len(lengths), per_slot).astype(np.int32)
        shape = (sum(lengths), kv_heads, head_dim)
        self.k, self.v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
        self.positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        self.slots = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        kv_append(self.k, self.v, self.positions, self.slots, self.table, self.cache, LAYER)

    def queries(self, rows):
        return rng.standard_normal((rows, self.heads, self.cache.shape[5]), dtype=np.float32)

    def attend(self, q, positions, slots):
        out = np.full(q.shape, np.nan, np.float32)
        attention(q, positions, slots, self.table, self.cache, LAYER, self.scale, out)
        return out

    def expected(self, q, positions, slots):
        out = np.zeros(q.shape)
        group = self.heads // self.k.shape[1]
        for r, (position, slot) in enumerate(zip(positions, slots, strict=True)):
            if slot < 0:
                continue
            mine = (self.slots == slot) & (self.positions <= position)
            k, v = self.k[mine].astype(np.float64), self.v[mine].astype(np.float64)
            for h in range(self.heads):
                score = self.scale * (k[:, h // group] @ q[r, h].astype(np.float64))
                weight = np.exp(score - score.max())
                out[r, h] = (weight / weight.sum()) @ v[:, h // group]
        return out


def rows(*pairs):
    return np.array([p for p, _ in pairs], np.int32), np.array([s for _, s in pairs], np.int32)


SHAPES = [
    (9, 3, 64, 16),
    (4, 4, 80, 16),
    (8, 1, 96, 4),
    (4, 2, 128, 64),
    (2, 2, 8, 1),
    (6, 2, 24, 128),
    (32, 1, 64, 16),
]


@pytest.mark.parametrize("heads,kv_heads,head_dim,tokens", SHAPES)
def test_matches_float64(heads, kv_heads, head_dim, tokens, threads):
    s = Sequences(heads, kv_heads, head_dim, tokens, [1100, 70, 600])
    chunk = [(p, 2) for p in range(500, 530)]
    positions, slots = rows((0, 0), (15, 1), (16, 1), (63, 0), (64, 0), (511, 0), (512, 0), (1099, 0), (7, -1), *chunk)
    q = s.queries(len(positions))
    assert np.abs(s.attend(q, positions, slots) - s.expected(q, positions, slots)).max() < 3e-6


@pytest.mark.parametrize("heads,kv_heads,head_dim,tokens", SHAPES[:3])
def test_bits_do_not_depend_on_chunks_batch_or_threads(heads, kv_heads, head_dim, tokens, threads):
    length = 700
    s = Sequences(heads, kv_heads, head_dim, tokens, [length, 90])
    positions, slots = s.positions[:length], s.slots[:length]
    q = s.queries(length)
    set_threads(1)
    whole = s.attend(q, positions, slots)
    set_threads(threads)
    for chunk in (1, 7, 64, 256):
        parts = [slice(i, i + chunk) for i in range(0, length, chunk)]
        if chunk == 1:
            parts = parts[:70] + parts[505:520] + parts[-3:]
        for part in parts:
            got = s.attend(q[part].copy(), positions[part].copy(), slots[part].copy())
            assert got.tobytes() == whole[part].tobytes(), (chunk, part)
    order = rng.permutation(length)
    assert s.attend(q[order], positions[order], slots[order]).tobytes() == whole[order].tobytes()


def test_large_scores_and_a_late_maximum():
    s = Sequences(2, 1, 64, 16, [600])
    positions, slots = rows((599, 0), (300, 0))
    q = s.queries(2) * 60  # scores of several hundred: the sums are rescaled many times and far terms vanish
    got, want = s.attend(q, positions, slots), s.expected(q, positions, slots)
    assert np.abs(got - want).max() < 2e-4


def test_a_later_token_never_leaks_into_an_earlier_row(threads):
    s = Sequences(6, 2, 64, 16, [200])
    positions, slots = s.positions[100:140], s.slots[100:140]
    q = s.queries(40)
    clean = s.attend(q, positions, slots)
    for poison in (np.nan, np.inf, -0.0):
        s.cache[s.table[0, 120 // 16], LAYER, :, :, 120 % 16 :] = poison
        s.cache[s.table[0, 128 // 16 :], LAYER] = poison
        s.cache[:, 1 - LAYER] = poison
        assert s.attend(q, positions, slots)[:20].tobytes() == clean[:20].tobytes()
    s.cache[...] = np.nan
    assert np.isnan(s.attend(q, positions, slots)).all()  # the poison does show where it is read


def test_padding_rows_write_nothing_and_read_nothing():
    s = Sequences(4, 2, 32, 16, [40])
    before = s.cache.copy()
    bad = np.array([-1, -7], np.int32)
    wild = np.array([-5, 10**6], np.int32)
    k = np.ones((2, 2, 32), np.float32)
    kv_append(k, k, wild, bad, s.table, s.cache, LAYER)
    assert s.cache.tobytes() == before.tobytes()
    out = s.attend(np.full((2, 4, 32), np.nan, np.float32), wild, bad)
    assert not out.any()


def test_append_touches_only_its_places():
    s = Sequences(4, 2, 32, 16, [40, 3])
    assert np.isnan(s.cache[:, 1 - LAYER]).all()
    assert np.isfinite(s.cache[:, LAYER]).sum() == 2 * 43 * 2 * 32
    before = s.cache.copy()
    k, v = (rng.standard_normal((2, 2, 32), dtype=np.float32) for _ in range(2))
    positions, slots = rows((40, 0), (3, 1))
    kv_append(k, v, positions, slots, s.table, s.cache, LAYER)
    for r in range(2):
        place = s.cache[s.table[slots[r], positions[r] // 16], LAYER, :, :, positions[r] % 16]
        assert np.array_equal(place, np.stack([k[r], v[r]]))
        place[...] = np.nan
    assert s.cache.tobytes() == before.tobytes()


def test_no_rows():
    s = Sequences(4, 2, 32, 16, [4])
    none = np.empty(0, np.int32)
    assert s.attend(s.queries(0), none, none).shape == (0, 4, 32)


def test_refusals_name_what_is_wrong():
    s = Sequences(4, 2, 32, 16, [40])
    q, (positions, slots) = s.queries(1), rows((30, 0))
    out = np.empty_like(q)

    def call(**changes):
        args = {
            "q": q, "positions": positions, "row_slot": slots, "block_table": s.table, "cache": s.cache, "layer": 0,
            "scale": 1.0, "out": out, **changes,
        }  # fmt: skip
        attention(**args)

    outside = s.table.copy()
    outside[0, 1] = len(s.cache)
    for changes, word in [
        ({"q": q[:, :3].copy(), "out": out[:, :3].copy()}, "3 heads"),
        ({"positions": positions.astype(np.int64)}, "positions: want int32"),
        ({"positions": positions + 1000}, "position"),
        ({"positions": positions - 31}, "position"),
        ({"row_slot": slots + 1}, "slot"),
        ({"block_table": outside}, "block_table"),
        ({"block_table": np.full_like(s.table, -1)}, "block_table"),
        ({"layer": 2}, "layer"),
        ({"out": out[:0]}, "out"),
        ({"cache": s.cache[:, :, :, :, :12].copy()}, "power of two"),
    ]:
        with pytest.raises(ValueError, match=word):
            call(**changes)
    k = np.zeros((1, 2, 32), np.float32)
    for bad_positions, bad_slots, table, word in [
        (positions + 1000, slots, s.table, "position"),
        (positions, slots + 5, s.table, "slot"),
        (positions, slots, outside, "block_table"),
    ]:
        with pytest.raises(ValueError, match=word):
            kv_append(k, k, bad_positions, bad_slots, table, s.cache, 0)
