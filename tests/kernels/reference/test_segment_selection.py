"""Selection from a cache: scores, gates, guards, sharing, prefill rules, counts."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.errors import ConfigError, NumericalError, ShapeError
from kvsieve.kernels.reference import ReferenceBackend
from kvsieve.kernels.reference import selection as sel
from kvsieve.kernels.reference.segment_selection import count_pairs
from tests.kernels.reference.caches import (
    filled_segment,
    last_token,
    plan,
    random_qkv,
    rows,
    stored,
)

BACKEND = ReferenceBackend()
TYPES = ["f32", "f16", "q8_0", "q4_0"]
SCALE = 0.25


def as_sets(lists):
    flat = np.split(lists.indices, lists.indptr[1:-1])
    return [[int(b) for b in row] for row in flat]


def by_hand(segment, q, *, block_size, num_probes):
    """Scores f64 [Hq, Nb] of a decoded token from what the cache holds, key by key."""
    tokens = segment.start + 1
    group = q.shape[1] // segment.pages.shape[2]
    out = []
    for head in range(q.shape[1]):
        k = stored(segment, head // group, "k")
        scores = []
        for p0 in range(0, tokens, block_size):
            p1 = min(p0 + block_size, tokens)
            step = max(1, (p1 - p0) // num_probes)
            scores.append(max(q[0, head] @ k[p] * SCALE for p in range(p0, p1, step)))
        out.append(scores)
    return np.array(out)


def decode(tokens, *, cache_type="f32", q_heads=4, kv_heads=2, seed=0, **settings):
    q, k, v = random_qkv(tokens, q_heads, kv_heads, seed=seed)
    sparse = plan(**settings)
    segment = filled_segment(k, v, k_type=cache_type, sparse=sparse)
    return last_token(segment), q[-1:]


# -- scores -------------------------------------------------------------------------------------
@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize(("block_size", "num_probes"), [(32, 8), (64, 8), (32, 3), (96, 32)])
@pytest.mark.parametrize("tokens", [96, 97, 105, 127, 200])
def test_scores(cache_type, block_size, num_probes, tokens) -> None:
    segment, q = decode(tokens, cache_type=cache_type, block_size=block_size, num_probes=num_probes)
    got = BACKEND.score_blocks(segment, 0, q, scale=SCALE)
    want = by_hand(segment, q, block_size=block_size, num_probes=num_probes)
    tolerance = 1e-5 if cache_type in ("f32", "f16") else 0.05  # 8-bit queries
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


def test_q8_scores_are_integers_times_one_product() -> None:
    segment, q = decode(100, cache_type="q8_0", q_heads=2, kv_heads=2)
    folded = q[0] * np.float32(SCALE)
    for head, score in enumerate(BACKEND.score_blocks(segment, 0, q, scale=SCALE)):
        q_scale = np.abs(folded[head]).max() / np.float32(127)
        codes = np.rint(folded[head] / q_scale).astype(int)
        _, k, _ = random_qkv(100, 2, 2)
        best = -np.inf
        for position in range(96, 100):
            k_scale = np.abs(k[position, head]).max() / np.float32(127)
            dot = int(codes @ np.rint(k[position, head] / k_scale).astype(int))
            best = max(best, np.float32(dot) * (k_scale * q_scale))
        assert score[3] == np.float32(best)


# -- decode -------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [1, 10, 31, 32, 33, 50, 64, 96, 97, 128])
@pytest.mark.parametrize("selector", ["probe", "even"])
def test_att_06_gate(tokens, selector) -> None:
    """Budget of 128 tokens: everything fits up to 128, and 97 tokens are 4 blocks, not 3."""
    segment, q = decode(tokens, k=4, selector=selector)
    assert BACKEND.select(segment, 0, q, scale=SCALE) is None


def test_gate_opens_one_token_later() -> None:
    segment, q = decode(129, k=4)
    assert BACKEND.select(segment, 0, q, scale=SCALE) is not None
    segment, q = decode(65, k=2)
    assert BACKEND.select(segment, 0, q, scale=SCALE) is not None
    segment, q = decode(64, k=1)  # beyond the budget, but not beyond 64 tokens
    assert BACKEND.select(segment, 0, q, scale=SCALE) is None


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_even_per_head(cache_type, k) -> None:
    segment, q = decode(250, k=k, cache_type=cache_type)
    lists = BACKEND.select(segment, 0, q, scale=SCALE)
    scores = BACKEND.score_blocks(segment, 0, q, scale=SCALE)
    assert (lists.num_heads, lists.num_tiles) == (4, 1)
    guards = [7, 0, 6][:k]
    for head, chosen in enumerate(as_sets(lists)):
        order = sorted(set(range(8)) - set(guards), key=lambda b: (-scores[head, b], b))
        assert chosen == sorted(guards + order[: k - len(guards)])


def test_share_group_reads_one_list_per_kv_head() -> None:
    segment, q = decode(250, k=5, share="group")
    lists = BACKEND.select(segment, 0, q, scale=SCALE)
    scores = BACKEND.score_blocks(segment, 0, q, scale=SCALE)
    assert lists.num_heads == 2
    for kv_head, chosen in enumerate(as_sets(lists)):
        heads = scores[2 * kv_head : 2 * kv_head + 2]
        merged = (heads - heads[:, :7].max(axis=1, keepdims=True)).max(axis=0)  # block 7 is open
        order = sorted(range(1, 6), key=lambda b: (-merged[b], b))
        assert chosen == sorted([0, 6, 7, *order[:2]])


@pytest.mark.parametrize(("tokens", "wanted"), [(250, 2), (256, 1)])
def test_share_group_leaves_an_open_block_out_of_the_maximum(tokens, wanted) -> None:
    """Head 0 likes block 2 (9) and head 1 block 3 (100, else 98); head 0 also likes the last (90).

    While the last block is open, head 0 says 0 to block 2, before head 1's -2 for the others. Once
    it is full, head 0 says -81 to block 2, so only head 1's voice is left.
    """
    k = np.zeros((tokens, 1, 32), dtype=np.float32)
    k[:, 0, 1] = 98
    k[2 * 32, 0, 0], k[7 * 32, 0, 0], k[3 * 32, 0, 1] = 9, 90, 100
    q = np.zeros((1, 2, 32), dtype=np.float32)
    q[0, 0, 0] = q[0, 1, 1] = 1
    segment = last_token(filled_segment(k, k, sparse=plan(k=5, share="group")))
    (chosen,) = as_sets(BACKEND.select(segment, 0, q, scale=1.0))
    assert chosen == [0, *sorted([wanted, 3]), 6, 7]


def test_probe_reserves_by_importance_of_its_layer() -> None:
    segment, q = decode(250, k=4, selector="probe")
    pages = np.repeat(segment.pages, 2, axis=0)
    importance = np.zeros((2, 300), dtype=np.int64)
    importance[0, [5, 40]] = 100, 100
    importance[1, [33, 63, 190]] = 3, 3, 5  # blocks 1 and 5 win by all their tokens
    importance[:, 250:] = 10**6  # tokens after the query: not there yet
    segment = replace(segment, pages=pages, importance=importance)
    for layer, reserved in ((0, {0, 1}), (1, {1, 5})):
        for chosen in as_sets(BACKEND.select(segment, layer, q, scale=SCALE)):
            assert len(chosen) == 4
            assert reserved | {7} <= set(chosen)


def test_probe_without_importance_is_best_scores_and_the_last_block() -> None:
    segment, q = decode(250, k=3, selector="probe")
    scores = BACKEND.score_blocks(segment, 0, q, scale=SCALE)
    for head, chosen in enumerate(as_sets(BACKEND.select(segment, 0, q, scale=SCALE))):
        order = sorted(range(8), key=lambda b: (-scores[head, b], b))[:3]
        want = order if 7 in order else [*order[:2], 7]
        assert chosen == sorted(want)


def test_probe_k1_with_importance_does_not_read_the_last_block() -> None:
    segment, q = decode(250, k=1, selector="probe")
    importance = np.zeros((1, 250), dtype=np.int64)
    importance[0, 70] = 1
    lists = BACKEND.select(replace(segment, importance=importance), 0, q, scale=SCALE)
    assert as_sets(lists) == [[2]] * 4


def test_even_ignores_importance() -> None:
    segment, q = decode(250, k=4)
    importance = np.zeros((1, 250), dtype=np.int64)
    importance[0, 32:64] = 10**9
    with_it = BACKEND.select(replace(segment, importance=importance), 0, q, scale=SCALE)
    without = BACKEND.select(segment, 0, q, scale=SCALE)
    assert as_sets(with_it) == as_sets(without)


@pytest.mark.parametrize("selector", ["probe", "even"])
def test_sparse_block_of_64_chooses_aligned_pairs(selector) -> None:
    segment, q = decode(64 * 5 + 20, k=3, block_size=64, selector=selector)
    for chosen in as_sets(BACKEND.select(segment, 0, q, scale=SCALE)):
        pairs = {b // 2 for b in chosen}
        assert len(pairs) == 3
        assert 5 in pairs
        # The last selection block holds one block of 32 so far.
        assert chosen == sorted(b for p in pairs for b in (2 * p, 2 * p + 1) if b <= 10)


@pytest.mark.parametrize("cache_type", TYPES)
def test_decode_selection_does_not_see_later_tokens(cache_type) -> None:
    q, k, v = random_qkv(300, 4, 2)
    sparse = plan(k=4)
    early = filled_segment(k[:200], v[:200], k_type=cache_type, sparse=sparse)
    full = filled_segment(k, v, k_type=cache_type, sparse=sparse)
    cut = replace(full, start=199, q_len=1, is_prefill=False)
    args = (0, q[199:200])
    want = BACKEND.score_blocks(last_token(early), *args, scale=SCALE)
    assert np.array_equal(BACKEND.score_blocks(cut, *args, scale=SCALE), want)


# -- prefill ------------------------------------------------------------------------------------
def naive_tile(segment, q, kv_head, *, tile, settings):
    """Section 6, row by row: the blocks of 32 that a tile reads."""
    size, k = settings.block_size, settings.k
    own = tile * 32 // size
    step = max(1, size // settings.num_probes)
    group = q.shape[1] // segment.pages.shape[2]
    keys = stored(segment, kv_head, "k")
    merged = np.full(own, -np.inf)
    for row in range(tile * 32, min(tile * 32 + 32, len(q))):
        for head in range(kv_head * group, (kv_head + 1) * group):
            logits = keys[: own * size].astype(np.float64) @ q[row, head] * SCALE
            scores = logits.reshape(own, size)[:, ::step].max(axis=1)
            merged = np.maximum(merged, scores - scores.max())
    guards = list(dict.fromkeys([own, own - 1, 0]))[:k]
    order = [b for b in np.argsort(-merged, kind="stable") if b not in guards]
    chosen = guards + [int(b) for b in order[: k - len(guards)]]
    return sorted(b for b in range(tile + 1) if b * 32 // size in chosen)


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
@pytest.mark.parametrize(
    "settings",
    [{"k": 4}, {"k": 1}, {"k": 2}, {"k": 3, "block_size": 64}, {"k": 5, "num_probes": 32}],
)
@pytest.mark.parametrize("selector", ["probe", "even"])
def test_prefill_lists(cache_type, settings, selector) -> None:
    q, k, v = random_qkv(340, 4, 2)
    sparse = plan(**settings, selector=selector, exact_from_tile=9)
    segment = filled_segment(k, v, k_type=cache_type, sparse=sparse)
    lists = BACKEND.select(segment, 0, q, scale=SCALE)
    assert (lists.num_heads, lists.num_tiles) == (2, 11)
    got = as_sets(lists)
    for kv_head in range(2):
        for tile in range(11):
            chosen = got[kv_head * 11 + tile]
            own = tile * 32 // sparse.block_size
            if tile < 2 or tile >= 9 or own + 1 <= sparse.k:
                assert chosen == list(range(tile + 1))
            elif cache_type == "f32":  # integer scores may order near-equal blocks otherwise
                assert chosen == naive_tile(segment, q, kv_head, tile=tile, settings=sparse)
            assert chosen[-1] == tile


def test_prefill_gate_for_the_whole_segment() -> None:
    q, k, v = random_qkv(200, 2, 1)
    for settings in ({"k": 7}, {"k": 2, "exact_from_tile": 2}, {"k": 2, "exact_from_tile": 0}):
        segment = filled_segment(k, v, sparse=plan(**settings))
        assert BACKEND.select(segment, 0, q, scale=SCALE) is None
    assert BACKEND.select(filled_segment(k, v), 0, q, scale=SCALE) is None


def test_prefill_any_chunking_gives_the_same_lists() -> None:
    q, k, v = random_qkv(340, 4, 2)
    sparse = plan(k=3, selector="even")
    whole = as_sets(
        BACKEND.select(filled_segment(k, v, k_type="q8_0", sparse=sparse), 0, q, scale=SCALE)
    )
    for chunk in (32, 96):
        for start in range(0, 340, chunk):
            stop = min(start + chunk, 340)
            written = filled_segment(k[:stop], v[:stop], k_type="q8_0", sparse=sparse)
            part = rows(written, start, stop)
            lists = BACKEND.select(part, 0, q[start:stop], scale=SCALE)
            first, last = start // 32, -(-stop // 32)
            want = [whole[head * 11 + tile] for head in range(2) for tile in range(first, last)]
            if lists is None:
                want_exact = [
                    list(range(tile + 1)) for _ in range(2) for tile in range(first, last)
                ]
                assert want == want_exact
            else:
                assert as_sets(lists) == want


@pytest.mark.parametrize("cache_type", TYPES)
def test_prefill_later_tiles_change_nothing_earlier(cache_type) -> None:
    q, k, v = random_qkv(320, 4, 2)
    sparse = plan(k=3)

    def run():
        segment = filled_segment(k, v, k_type=cache_type, sparse=sparse)
        lists = BACKEND.select(segment, 0, q, scale=SCALE)
        return as_sets(lists), BACKEND.attend(segment, 0, q, scale=SCALE, lists=lists)

    sets, out = run()
    q[256:], k[256:], v[256:] = 40.0, -70.0, 1000.0
    later_sets, later_out = run()
    for head in range(2):
        assert sets[head * 10 : head * 10 + 8] == later_sets[head * 10 : head * 10 + 8]
    assert np.array_equal(out[:256], later_out[:256])
    assert not np.array_equal(out[256:], later_out[256:])


def test_a_future_block_cannot_push_out_a_past_one() -> None:
    """Blocks after the tile score far above all others: mask before top-k."""
    q, k, v = random_qkv(320, 1, 1)
    q[...] = np.abs(q)
    k[:, :, :] = np.linspace(-1, 1, 320)[:, None, None]  # later keys score higher
    segment = filled_segment(k, v, sparse=plan(k=4))
    for tile, chosen in enumerate(as_sets(BACKEND.select(segment, 0, q, scale=SCALE))):
        assert len(chosen) == min(4, tile + 1)
        if tile >= 4:
            assert chosen == [0, tile - 2, tile - 1, tile]


def test_every_row_of_the_tile_has_a_say() -> None:
    """One row of tile 8 wants block 3; the others score all blocks alike, with large logits."""
    k = np.zeros((288, 1, 32), dtype=np.float32)
    k[:, :, 1] = 1.0
    k[3 * 32 + 4, 0, 0] = 1.0
    q = np.zeros((288, 1, 32), dtype=np.float32)
    q[:, :, 1] = 50.0
    k[5 * 32, 0, 1] = 1.001  # their best by a little: everything else is at -0.05
    q[8 * 32 + 17, 0, :2] = [9.0, 0.0]
    segment = filled_segment(k, k, sparse=plan(k=5))
    lists = BACKEND.select(segment, 0, q, scale=1.0)
    assert as_sets(lists)[8] == [0, 3, 5, 7, 8]


# -- counts -------------------------------------------------------------------------------------
def test_pairs_are_counted_once_per_kv_head_over_the_union() -> None:
    segment, _ = decode(200, q_heads=4, kv_heads=2)
    chosen = [np.array(row, np.int32) for row in ([0, 6], [1, 6], [5, 6], [5, 6])]
    assert count_pairs(segment, sel.block_lists(chosen, num_heads=4)) == (3 + 2, 2 * 7)
    assert count_pairs(segment, None) == (14, 14)


def test_pairs_of_prefill_tiles_count_their_rows() -> None:
    _, k, v = random_qkv(70, 2, 2)
    segment = filled_segment(k, v)
    causal = 2 * (32 * 1 + 32 * 2 + 6 * 3)
    assert count_pairs(segment, None) == (causal, causal)
    chosen = [np.array(row, np.int32) for row in ([0], [1], [0, 2], [0], [0, 1], [2])]
    attended = (32 + 32 + 6 * 2) + (32 + 32 * 2 + 6)
    assert count_pairs(segment, sel.block_lists(chosen, num_heads=2)) == (attended, causal)


# -- errors -------------------------------------------------------------------------------------
def test_errors() -> None:
    segment, q = decode(200)
    with pytest.raises(ConfigError, match=r"\[score_blocks\] segment.sparse"):
        BACKEND.score_blocks(replace(segment, sparse=None), 0, q, scale=SCALE)
    two = replace(segment, start=198, q_len=2)
    with pytest.raises(ShapeError, match=r"\[select\] q: expected one decoded token, got 2"):
        BACKEND.select(two, 0, np.repeat(q, 2, axis=0), scale=SCALE)
    with pytest.raises(
        ShapeError, match=r"\[select\] q: expected C-contiguous float32 \(1, \*, 32\)"
    ):
        BACKEND.select(segment, 0, q[:, :, :16].copy(), scale=SCALE)
    with pytest.raises(NumericalError):
        BACKEND.select(segment, 0, q * np.float32(np.inf), scale=SCALE)


def test_plan_gates_agree_with_the_rules() -> None:
    for k in (1, 2, 3, 5):
        for size in (32, 64, 96):
            sparse = plan(k=k, block_size=size, exact_from_tile=9)
            for n in range(1, 400):
                assert sparse.decode_is_sparse(n) == sel.decode_is_sparse(n, k, block_size=size)
            for tile in range(14):
                want = sel.tile_is_sparse(tile, k, exact_from_tile=9, block_size=size)
                assert sparse.tile_is_sparse(tile) == want
