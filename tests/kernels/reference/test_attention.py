"""Attention over lists of blocks: the float64 oracle, hand values, ATT-01, 03, 06, 07, 09."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.errors import NumericalError, ShapeError
from kvsieve.kernels.reference import ReferenceBackend
from kvsieve.kernels.reference.attention import Partial, attend_run, merge
from kvsieve.kernels.reference.quantize import Rows
from kvsieve.kernels.reference.selection import block_lists
from tests.kernels.reference.caches import (
    dense_oracle,
    filled_segment,
    last_token,
    probabilities,
    random_qkv,
    rows,
    stored,
)

BACKEND = ReferenceBackend()
TYPES = ["f32", "f16", "q8_0", "q4_0"]
# Against attention over the dequantised cache: 8-bit queries and probabilities remain.
TOLERANCE = {"f32": 2e-6, "f16": 2e-6, "q8_0": 0.03, "q4_0": 0.03}


def lists(*blocks, heads=1):
    return block_lists([np.array(row, dtype=np.int32) for row in blocks], num_heads=heads)


def constant_cache(logit_values, values, *, cache_type="f32"):
    """One KV head of 32 dimensions: with `unit_q` and scale 1, logits are as given."""
    k = np.zeros((len(values), 1, 32), dtype=np.float32)
    v = np.zeros_like(k)
    k[:, 0, 0], v[:, 0, :] = logit_values, np.asarray(values, dtype=np.float32)[:, None]
    return filled_segment(k, v, k_type=cache_type)


def unit_q(tokens=1, heads=1):
    q = np.zeros((tokens, heads, 32), dtype=np.float32)
    q[:, :, 0] = 1
    return q


def check_against_oracle(segment, q, out, grid, *, scale, tolerance) -> None:
    """`grid` bool [Hq, Tq, Nb]: blocks read; the causal triangle is added here."""
    tokens = segment.start + segment.q_len
    positions = np.arange(segment.start, tokens)
    causal = np.arange(tokens) <= positions[:, None]
    group = q.shape[1] // segment.pages.shape[2]
    for head in range(q.shape[1]):
        mask = grid[head][:, np.arange(tokens) // 32] & causal
        k, v = stored(segment, head // group, "k"), stored(segment, head // group, "v")
        want = dense_oracle(q[:, head], k, v, mask, scale=scale)
        np.testing.assert_allclose(out[:, head], want, rtol=tolerance, atol=tolerance)


# -- worked values ------------------------------------------------------------------------------
def test_worked_value_of_section_1() -> None:
    """Logits 0, ln 2, ln 3 over V 2, 4, 8: all 17/3; the first and last alone 6.5, not 4.333."""
    segment = last_token(constant_cache([0, np.log(2), np.log(3)], [2, 4, 8]))
    out = BACKEND.attend(segment, 0, unit_q(), scale=1.0, lists=None)
    np.testing.assert_allclose(out, 17 / 3, rtol=1e-6)
    # The same with each token in its own block, the others out of reach.
    k = np.full(96, -1e4)
    v = np.zeros(96)
    k[[0, 32, 64]], v[[0, 32, 64]] = [0, np.log(2), np.log(3)], [2, 4, 8]
    spread = last_token(constant_cache(k, v))
    out = BACKEND.attend(spread, 0, unit_q(), scale=1.0, lists=lists([0, 2]))
    np.testing.assert_allclose(out, 6.5, rtol=1e-6)


# -- ATT-01: nothing visible in the first listed blocks -----------------------------------------
@pytest.mark.parametrize("width", [1, 16, 32])
def test_att_01_leading_run_wholly_masked(width) -> None:
    """Two keys with logits 0 and ln 3, values 1 and 5, behind a tile that shows nothing: 4.0."""
    k = np.full((width + 2, 32), 0, dtype=np.float32)
    v = np.full((width + 2, 32), 999, dtype=np.float32)
    k[-2:, 0], v[-2], v[-1] = [0, np.log(3)], 1, 5
    visible = np.zeros((1, width + 2), dtype=bool)
    visible[0, -2:] = True
    q = Rows(values=unit_q()[0], scales=None)

    def part(where):
        keys, values = Rows(values=k[where], scales=None), Rows(values=v[where], scales=None)
        return attend_run(q, keys, values, visible=visible[:, where])[0]

    empty, seen = part(slice(0, width)), part(slice(width, None))
    assert empty.m == -np.inf
    assert empty.s == 0
    for total in (merge(empty, seen), merge(seen, empty), seen, part(slice(None))):
        assert (total.o / total.s[:, None] == np.float32(4.0)).all()
    both = merge(merge(empty, empty), merge(seen, empty))
    assert np.array_equal(both.o, seen.o)


@pytest.mark.parametrize("cache_type", TYPES)
def test_att_01_listed_blocks_in_the_future_change_nothing(cache_type) -> None:
    """Rows with future blocks in their list: the bits of the list without them."""
    q, k, v = random_qkv(18 * 32, 1, 1)
    segment = filled_segment(k, v, k_type=cache_type)
    alone = [[tile] for tile in range(18)]
    future = [list(range(tile, 18)) for tile in range(18)]  # tile 0: its second run is all future
    args = (segment, 0, q)
    want = BACKEND.attend(*args, scale=0.2, lists=lists(*alone))
    got = BACKEND.attend(*args, scale=0.2, lists=lists(*future))
    assert np.isfinite(got).all()
    assert np.array_equal(got, want)


def test_a_row_that_sees_nothing_is_an_error() -> None:
    q, k, v = random_qkv(64, 1, 1)
    segment = rows(filled_segment(k, v), 0, 32)
    with pytest.raises(ShapeError, match="blocks 0 to 0"):
        BACKEND.attend(segment, 0, q[:32], scale=1.0, lists=lists([1]))
    whole = filled_segment(k, v)
    with pytest.raises(ShapeError, match="visible token for every row"):
        BACKEND.attend(whole, 0, q, scale=1.0, lists=lists([1], [1]))


# -- ATT-03: the open block ---------------------------------------------------------------------
def test_att_03_no_zero_rows_in_the_open_block() -> None:
    segment = last_token(constant_cache(np.full(33, -10.0), np.ones(33)))
    out = BACKEND.attend(segment, 0, unit_q(), scale=1.0, lists=None)
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63, 64, 65, 95, 97])
def test_att_03_lengths(cache_type, tokens) -> None:
    q, k, v = random_qkv(tokens, 2, 1, seed=tokens)
    segment = filled_segment(k, v, k_type=cache_type)
    out = BACKEND.attend(segment, 0, q, scale=0.2, lists=None)
    grid = np.ones((2, tokens, -(-tokens // 32)), dtype=bool)
    check_against_oracle(segment, q, out, grid, scale=0.2, tolerance=TOLERANCE[cache_type])
    decoded = BACKEND.attend(last_token(segment), 0, q[-1:], scale=0.2, lists=None)
    assert np.array_equal(decoded[0], out[-1])


# -- the oracle ---------------------------------------------------------------------------------
@pytest.mark.parametrize("v_type", TYPES)
@pytest.mark.parametrize("k_type", TYPES)
@pytest.mark.parametrize("head_dim", [32, 64])
def test_exact_attention(k_type, v_type, head_dim) -> None:
    q, k, v = random_qkv(100, 4, 2, head_dim)
    segment = filled_segment(k, v, k_type=k_type, v_type=v_type)
    scale = head_dim**-0.5
    out = BACKEND.attend(segment, 0, q, scale=scale, lists=None)
    grid = np.ones((4, 100, 4), dtype=bool)
    tolerance = max(TOLERANCE[k_type], TOLERANCE[v_type])
    check_against_oracle(segment, q, out, grid, scale=scale, tolerance=tolerance)


@pytest.mark.parametrize("cache_type", TYPES)
def test_sparse_equals_dense_under_the_same_mask(cache_type) -> None:
    """More than a run of blocks per list, different lists per KV head and tile."""
    tiles, kv_heads, rng = 40, 2, np.random.default_rng(5)
    q, k, v = random_qkv(tiles * 32 - 7, 4, kv_heads)
    whole = filled_segment(k, v, k_type=cache_type)
    segment = rows(whole, 38 * 32, len(q))
    chosen = np.zeros((kv_heads, 2, tiles), dtype=bool)
    chosen[:, :, :38] = rng.random((kv_heads, 2, 38)) < 0.6
    chosen[:, 0, 38] = chosen[:, 1, 39] = True
    listed = [np.flatnonzero(chosen[head, tile]) for head in range(kv_heads) for tile in (0, 1)]
    q = q[38 * 32 :]
    out = BACKEND.attend(segment, 0, q, scale=0.2, lists=lists(*listed, heads=kv_heads))
    grid = np.repeat(np.repeat(chosen, 32, axis=1)[:, : len(q)], 2, axis=0)
    check_against_oracle(segment, q, out, grid, scale=0.2, tolerance=TOLERANCE[cache_type])


def test_one_list_per_query_head() -> None:
    q, k, v = random_qkv(200, 4, 2)
    segment = last_token(filled_segment(k, v))
    chosen = [[0, 6], [1, 6], [2, 3, 6], [6]]
    out = BACKEND.attend(segment, 0, q[-1:], scale=0.2, lists=lists(*chosen, heads=4))
    grid = np.zeros((4, 1, 7), dtype=bool)
    for head, blocks in enumerate(chosen):
        grid[head, 0, blocks] = True
    check_against_oracle(segment, q[-1:], out, grid, scale=0.2, tolerance=2e-6)


def test_the_diagonal_block_keeps_its_triangle() -> None:
    """Token i of a block has value i and equal logits: row i is the mean of 0..i."""
    segment = constant_cache(np.zeros(64), np.arange(64))
    second = rows(segment, 32, 64)
    out = BACKEND.attend(second, 0, unit_q(32), scale=1.0, lists=lists([1]))
    want = np.array([np.arange(32, 32 + i + 1).mean() for i in range(32)])
    np.testing.assert_allclose(out[:, 0, 0], want, rtol=1e-6)


# -- ATT-06 -------------------------------------------------------------------------------------
@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("tokens", [1, 10, 33, 64, 97])
def test_att_06_a_list_of_all_blocks_is_the_exact_path_bit_for_bit(cache_type, tokens) -> None:
    q, k, v = random_qkv(tokens, 4, 2)
    segment = filled_segment(k, v, k_type=cache_type)
    tiles = -(-tokens // 32)
    everything = [list(range(tile + 1)) for _ in range(2) for tile in range(tiles)]
    exact = BACKEND.attend(segment, 0, q, scale=0.2, lists=None)
    listed = BACKEND.attend(segment, 0, q, scale=0.2, lists=lists(*everything, heads=2))
    assert np.array_equal(exact, listed)


# -- ATT-07 -------------------------------------------------------------------------------------
def test_att_07_two_new_queries_behind_two_cached_keys() -> None:
    segment = rows(constant_cache(np.zeros(4), [1, 2, 3, 4]), 2, 4)
    out = BACKEND.attend(segment, 0, unit_q(2), scale=1.0, lists=None)
    np.testing.assert_allclose(out[:, 0, 0], [2.0, 2.5], rtol=1e-6)


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("chunk", [1, 31, 32, 33, 37, 64, 130])
def test_att_07_any_chunking_gives_the_same_bits(cache_type, chunk) -> None:
    q, k, v = random_qkv(130, 2, 1)
    whole = filled_segment(k, v, k_type=cache_type)
    want = BACKEND.attend(whole, 0, q, scale=0.2, lists=None)
    for start in range(0, 130, chunk):
        stop = min(start + chunk, 130)
        # Only the tokens up to this chunk's end have been written.
        segment = rows(filled_segment(k[:stop], v[:stop], k_type=cache_type), start, stop)
        got = BACKEND.attend(segment, 0, q[start:stop], scale=0.2, lists=None)
        assert np.array_equal(got, want[start:stop])


@pytest.mark.parametrize("cache_type", TYPES)
def test_later_tokens_change_nothing_earlier(cache_type) -> None:
    q, k, v = random_qkv(100, 2, 1)
    before = BACKEND.attend(filled_segment(k, v, k_type=cache_type), 0, q, scale=0.2, lists=None)
    k[70:], v[70:], q[70:] = 300.0, -900.0, 50.0
    after = BACKEND.attend(filled_segment(k, v, k_type=cache_type), 0, q, scale=0.2, lists=None)
    assert np.array_equal(before[:70], after[:70])
    assert not np.array_equal(before[70:], after[70:])


# -- ATT-09 -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(6, 2), (28, 4), (48, 2), (32, 8), (8, 8), (8, 1)]
)
def test_att_09_query_heads_read_their_own_kv_head(q_heads, kv_heads) -> None:
    _, k, v = random_qkv(40, 1, kv_heads)
    v[...] = np.arange(kv_heads)[None, :, None]
    segment = filled_segment(k, v)
    q = np.random.default_rng(0).standard_normal((40, q_heads, 32), dtype=np.float32)
    want = np.repeat(np.arange(kv_heads), q_heads // kv_heads)
    chosen = [[head % 2] for head in range(kv_heads)]  # lists differ per KV head
    decode = last_token(segment)
    for listed in (None, lists(*chosen, heads=kv_heads)):
        out = BACKEND.attend(decode, 0, q[-1:], scale=0.2, lists=listed)
        np.testing.assert_allclose(out[0], np.repeat(want[:, None], 32, axis=1), rtol=1e-6)


def test_att_09_heads_that_do_not_divide() -> None:
    q, k, v = random_qkv(8, 5, 2)
    with pytest.raises(ShapeError, match="multiple of num_kv_heads=2 query heads, got 5"):
        BACKEND.attend(filled_segment(k, v), 0, q, scale=1.0, lists=None)


# -- importance ---------------------------------------------------------------------------------
def recording(segment):
    tokens = segment.start + segment.q_len
    return replace(
        segment, importance=np.zeros((1, tokens), dtype=np.int64), record_importance=True
    )


@pytest.mark.parametrize("tokens", [70, 520])
def test_importance_is_the_probability_received(tokens) -> None:
    q, k, v = random_qkv(tokens, 4, 2)
    segment = recording(filled_segment(k, v))
    BACKEND.attend(segment, 0, q, scale=0.2, lists=None)
    want = np.zeros(tokens)
    causal = np.tri(tokens, dtype=bool)
    for head in range(4):
        want += probabilities(q[:, head], k[:, head // 2], causal, scale=0.2).sum(axis=0)
    np.testing.assert_allclose(segment.importance[0] / 2**24, want, rtol=1e-4)
    assert segment.importance.sum() / 2**24 == pytest.approx(4 * tokens, rel=1e-6)


def test_importance_records_what_ran() -> None:
    q, k, v = random_qkv(128, 2, 1)
    segment = recording(rows(filled_segment(k, v), 96, 128))
    BACKEND.attend(segment, 0, q[96:], scale=0.2, lists=lists([1, 3]))
    assert not segment.importance[0, :32].any()
    assert not segment.importance[0, 64:96].any()
    assert segment.importance.sum() / 2**24 == pytest.approx(2 * 32, rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 32, 37])
def test_importance_does_not_depend_on_chunking(chunk) -> None:
    q, k, v = random_qkv(130, 2, 1)
    whole = recording(filled_segment(k, v, k_type="q8_0"))
    BACKEND.attend(whole, 0, q, scale=0.2, lists=None)
    pieces = recording(filled_segment(k, v, k_type="q8_0"))
    for start in range(0, 130, chunk):
        part = rows(pieces, start, min(start + chunk, 130))
        BACKEND.attend(part, 0, q[part.start : part.start + part.q_len], scale=0.2, lists=None)
    assert np.array_equal(whole.importance, pieces.importance)


def test_importance_is_left_alone_when_not_recorded() -> None:
    q, k, v = random_qkv(40, 2, 1)
    segment = replace(recording(filled_segment(k, v)), record_importance=False)
    BACKEND.attend(segment, 0, q, scale=0.2, lists=None)
    assert not segment.importance.any()


# -- numbers at the edge --------------------------------------------------------------------------
def test_probabilities_too_small_for_8_bits_vanish_quietly() -> None:
    """Page 1 holds the maximum; page 0's largest weight is below 2**-100."""
    k = np.full(64, -86.0)
    k[40] = 0
    v = np.full(64, 1e-3)
    segment = last_token(constant_cache(k, v, cache_type="q8_0"))
    out = BACKEND.attend(segment, 0, unit_q(), scale=1.0, lists=None)
    np.testing.assert_allclose(out, 1e-3, rtol=1e-2)


def test_kvq_01_a_channel_of_zeros() -> None:
    q, k, v = random_qkv(50, 1, 1)
    v[:, :, 7] = 0
    for cache_type in TYPES:
        segment = filled_segment(k, v, k_type=cache_type)
        out = BACKEND.attend(segment, 0, q, scale=0.2, lists=None)
        assert not out[:, :, 7].any()


def test_nan_in_a_query() -> None:
    q, k, v = random_qkv(8, 1, 1)
    q[3, 0, 2] = np.nan
    with pytest.raises(NumericalError, match=r"\[attend\] q"):
        BACKEND.attend(filled_segment(k, v), 0, q, scale=1.0, lists=None)


def test_merge_rescales_to_the_larger_maximum() -> None:
    def one(m, s, o):
        return Partial(m=np.float32(m), s=np.float32(s), o=np.float32(o))

    got = merge(one([0], [2], [[6]]), one([np.log(4)], [1], [[8]]))
    np.testing.assert_allclose([got.m[0], got.s[0], got.o[0, 0]], [np.log(4), 1.5, 9.5], rtol=1e-6)


# -- lists that do not fit -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lists([0], [0]), "heads of 1 tiles"),
        (lists([3]), "blocks 0 to 1"),
        (lists([-1]), "blocks 0 to 1"),
        (lists([1, 0]), "ascending"),
        (lists([1, 1]), "ascending"),
        (lists([]), "at least one block"),
    ],
)
def test_bad_lists(bad, message) -> None:
    q, k, v = random_qkv(40, 1, 1)
    with pytest.raises(ShapeError, match=message):
        BACKEND.attend(last_token(filled_segment(k, v)), 0, q[-1:], scale=1.0, lists=bad)
