"""Native == reference for every kernel, on every instruction set, with poisoned memory around."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.errors import ConfigError, NumericalError, ShapeError
from kvsieve.kernels.backend import BlockLists
from kvsieve.kernels.native import NativeBackend, supported_isas
from tests.kernels.parity import REFERENCE, close
from tests.kernels.reference.caches import empty_segment, last_token, plan, random_qkv, rows

SCALE = 0.2
TYPES = ["q8_0", "q4_0", "f16", "f32"]
MIXED = [("q8_0", "f16"), ("f32", "q4_0"), ("q4_0", "q8_0")]
HEADS = [(2, 2), (9, 3), (7, 1), (16, 2), (24, 1)]  # ratios 1, 3, 7, 8, 24
ALWAYS = 10**6


# -- cache -----------------------------------------------------------------------------------


def both_caches(native, tokens, *, q_heads=4, kv_heads=2, head_dim=32, seed=0, **options):
    """(q, segment of the reference, segment of the core), each filled by its own append."""
    q, k, v = random_qkv(tokens, q_heads, kv_heads, head_dim, seed=seed)
    result = []
    for backend in (REFERENCE, native):
        segment = empty_segment(tokens, head_dim=head_dim, kv_heads=kv_heads, layers=2, **options)
        backend.append(segment, 1, k, v)
        result.append(segment)
    return q, *result


@pytest.mark.parametrize("types", [(t, t) for t in TYPES] + MIXED)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 65, 97])
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_append_writes_the_same_bytes(native, types, tokens, head_dim):
    sparse = plan(block_size=64, num_probes=5)
    _, want, got = both_caches(
        native, tokens, head_dim=head_dim, k_type=types[0], v_type=types[1], sparse=sparse
    )
    assert np.array_equal(want.pages, got.pages)
    assert (want.index is None) == (types[0] != "q8_0")
    if want.index is not None:
        assert np.array_equal(want.index, got.index)


@pytest.mark.parametrize("cache_type", TYPES)
def test_append_of_zero_tiny_huge_and_subnormal_rows(native, cache_type):
    # KVQ-01: the same bytes as the specification, whose error bounds are tested on its own side.
    k = np.zeros((6, 2, 32), np.float32)
    k[1, 0, 3] = 1e-8
    k[2] = -1e7 if cache_type != "f16" else -1e4
    k[3, 1, 5] = 1e-42
    k[4] = 3.0
    segments = []
    for backend in (REFERENCE, native):
        segments.append(empty_segment(6, k_type=cache_type))
        backend.append(segments[-1], 0, k, k[::-1].copy())
    assert np.array_equal(segments[0].pages, segments[1].pages)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cache_type", TYPES)
def test_append_refuses_what_is_not_finite_and_spares_the_other_tokens(native, bad, cache_type):
    # KVQ-01
    _, k, v = random_qkv(40, 2, 2)
    clean = empty_segment(40, k_type=cache_type)
    native.append(clean, 0, k, v)
    k[7, 1, 3] = bad
    segment = empty_segment(40, k_type=cache_type)
    with pytest.raises(NumericalError, match="finite"):
        native.append(segment, 0, k, v)
    other_head = segment.pages[:, :, 0]
    assert np.array_equal(other_head, clean.pages[:, :, 0])


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_append_refuses_what_would_be_infinite_in_half_precision(native, backend):
    segment = empty_segment(1, k_type="f32", v_type="f16")
    k = np.ones((1, 2, 32), np.float32)
    chosen = native if backend == "native" else REFERENCE
    chosen.append(segment, 0, k * 1e6, k * 65519)
    with pytest.raises(NumericalError, match=r"v: expected"):
        chosen.append(segment, 0, k, k * 65520)


@pytest.mark.parametrize("cache_type", TYPES)
def test_a_channel_of_zeros_stays_zero(native, cache_type):
    # KVQ-01
    q, k, v = random_qkv(50, 4, 2, seed=1)
    v[:, :, 7] = 0
    segment = empty_segment(50, k_type=cache_type)
    native.append(segment, 0, k, v)
    out = native.attend(segment, 0, q, scale=SCALE, lists=None)
    assert not out[:, :, 7].any()
    assert out[:, :, 8].any()


# -- attention ---------------------------------------------------------------------------------


def tolerance(types):
    # 8-bit probabilities: one rounding that falls the other way moves a row by 1/255 of a page.
    return 2e-3 if {"q8_0", "q4_0"} & {types[1]} else 1e-5


@pytest.mark.parametrize("types", [(t, t) for t in TYPES] + MIXED)
@pytest.mark.parametrize("heads", HEADS)
def test_exact_attention(native, types, heads):
    tokens = 545  # two runs, an open block
    q, want_segment, got_segment = both_caches(
        native, tokens, q_heads=heads[0], kv_heads=heads[1], k_type=types[0], v_type=types[1]
    )
    want = REFERENCE.attend(rows(want_segment, 480, tokens), 1, q[480:], scale=SCALE, lists=None)
    got = native.attend(rows(got_segment, 480, tokens), 1, q[480:], scale=SCALE, lists=None)
    close(got, want, tolerance(types))
    decoded = native.attend(last_token(got_segment), 1, q[-1:], scale=SCALE, lists=None)
    assert np.array_equal(decoded[0], got[-1])


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63, 64, 65, 95, 97, 513])
def test_lengths_and_tails(native, cache_type, tokens):
    q, want_segment, got_segment = both_caches(native, tokens, k_type=cache_type, head_dim=64)
    want = REFERENCE.attend(want_segment, 1, q, scale=SCALE, lists=None)
    got = native.attend(got_segment, 1, q, scale=SCALE, lists=None)
    close(got, want, tolerance((cache_type, cache_type)))


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_head_dims(native, head_dim):
    q, want_segment, got_segment = both_caches(native, 70, head_dim=head_dim, k_type="q8_0")
    want = REFERENCE.attend(want_segment, 1, q, scale=SCALE, lists=None)
    close(native.attend(got_segment, 1, q, scale=SCALE, lists=None), want, 2e-3)


@pytest.mark.parametrize("per_q_head", [False, True])
def test_runs_without_a_visible_token_merge_as_nothing(native, per_q_head):
    # ATT-01: lists may name blocks of a row's future: here every tile lists all blocks, two runs.
    tokens = 600
    q, want_segment, got_segment = both_caches(native, tokens, k_type="q8_0")
    heads, blocks = (4 if per_q_head else 2), -(-tokens // 32)
    lists = BlockLists(
        num_heads=heads,
        num_tiles=blocks,
        indptr=np.arange(heads * blocks + 1) * blocks,
        indices=np.tile(np.arange(blocks, dtype=np.int32), heads * blocks),
    )
    got = native.attend(got_segment, 1, q, scale=SCALE, lists=lists)
    assert np.array_equal(got, native.attend(got_segment, 1, q, scale=SCALE, lists=None))
    close(got, REFERENCE.attend(want_segment, 1, q, scale=SCALE, lists=lists), 2e-3)


def test_lists_per_query_head_on_prompt_tiles(native):
    q, want_segment, got_segment = both_caches(native, 130, k_type="f32")
    rng = np.random.default_rng(9)
    chosen = [
        np.flatnonzero(np.r_[rng.random(tile) < 0.5, True]) for _ in range(4) for tile in range(5)
    ]
    lists = BlockLists(
        num_heads=4,
        num_tiles=5,
        indptr=np.cumsum([0, *map(len, chosen)]),
        indices=np.concatenate(chosen).astype(np.int32),
    )
    want = REFERENCE.attend(want_segment, 1, q, scale=SCALE, lists=lists)
    close(native.attend(got_segment, 1, q, scale=SCALE, lists=lists), want, 1e-5)


# -- selection ---------------------------------------------------------------------------------

PLANS = {
    "even": plan(selector="even", k=4),
    "even, shared": plan(selector="even", k=4, share="group"),
    "even, blocks of 64": plan(selector="even", k=3, block_size=64),
    "even, 3 probes": plan(selector="even", k=5, num_probes=3, share="group"),
    "probe": plan(selector="probe", k=3),
    "probe, shared, blocks of 96": plan(selector="probe", k=2, block_size=96, share="group"),
    "probe, k = 1": plan(selector="probe", k=1),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("heads", [(9, 3), (24, 1), (2, 2)])
@pytest.mark.parametrize("k_type", TYPES)
def test_selection_scores_importance_and_sparse_attention(native, name, heads, k_type):
    tokens = 590
    q, *segments = both_caches(
        native, tokens, q_heads=heads[0], kv_heads=heads[1], k_type=k_type, sparse=PLANS[name]
    )
    results = []
    for backend, segment in zip((REFERENCE, native), segments, strict=True):
        segment = replace(
            segment, importance=np.zeros((2, tokens), np.int64), record_importance=True
        )
        prompt, token = rows(segment, 0, tokens - 1), last_token(segment)
        lists = backend.select(prompt, 1, q[:-1], scale=SCALE)
        out = backend.attend(prompt, 1, q[:-1], scale=SCALE, lists=lists)
        # Importance comes from each backend's own exponentials: give both the same to choose by.
        importance = segment.importance.copy()
        segment.importance[1] >>= 12
        segment.importance[1] <<= 12
        results.append(
            {
                "lists": lists,
                "out": out,
                "importance": importance,
                "scores": backend.score_blocks(token, 1, q[-1:], scale=SCALE),
                "decode lists": backend.select(token, 1, q[-1:], scale=SCALE),
            }
        )
    want, got = results
    for key in ("lists", "decode lists"):
        assert want[key] is not None
        assert (want[key].num_heads, want[key].num_tiles) == (
            got[key].num_heads,
            got[key].num_tiles,
        )
        assert np.array_equal(want[key].indptr, got[key].indptr)
        assert np.array_equal(want[key].indices, got[key].indices)
    if k_type in ("q8_0", "q4_0"):
        assert np.array_equal(want["scores"], got["scores"])
    else:
        close(got["scores"], want["scores"], 1e-6)
    close(got["out"], want["out"], tolerance((k_type, k_type)))
    assert not got["importance"][0].any()
    # Units of 2^-24, summed over some 5,000 rows: a few units of rounding each way.
    assert np.abs(want["importance"] - got["importance"]).max() <= 2e-6 * 2**24 * heads[0]


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize(("k_type", "tokens"), [("q8_0", 10_001), ("q8_0", 9_216), ("f16", 8_770)])
def test_selection_on_two_levels(native, share, k_type, tokens):
    """Beyond 256 blocks: candidates by two keys per block, then the choice among their blocks."""
    sparse = plan(selector="even", k=20, share=share)
    q, *segments = both_caches(
        native, tokens, q_heads=6, kv_heads=2, head_dim=32, k_type=k_type, sparse=sparse
    )
    chosen = []
    for backend, segment in zip((REFERENCE, native), segments, strict=True):
        token = last_token(segment)
        chosen.append(backend.select(token, 1, q[-1:], scale=SCALE))
    want, got = chosen
    assert np.array_equal(want.indptr, got.indptr)
    assert np.array_equal(want.indices, got.indices)
    one_level = REFERENCE.score_blocks(last_token(segments[0]), 1, q[-1:], scale=SCALE)
    best = np.sort(np.argsort(-one_level[0], kind="stable")[:17])
    assert not set(best) <= set(want.indices[: want.indptr[1]]), "the first level left nothing out"


def test_importance_sums_to_the_number_of_queries(native):
    q, _, segment = both_caches(native, 200, k_type="q8_0")
    segment = replace(segment, importance=np.zeros((2, 200), np.int64), record_importance=True)
    native.attend(segment, 1, q, scale=SCALE, lists=None)
    assert segment.importance[1].sum() / 2**24 == pytest.approx(200 * 4, rel=1e-5)


@pytest.mark.parametrize("name", PLANS)
def test_the_same_bits_on_every_instruction_set_and_thread_count(name):
    tokens = 590
    outputs = []
    for isa in (name for name, supported in supported_isas().items() if supported):
        for threads in (1, 2, 3, 7):
            backend = NativeBackend(threads=threads, isa=isa)
            q, k, v = random_qkv(tokens, 6, 2, 64)
            segment = replace(
                empty_segment(tokens, head_dim=64, k_type="q8_0", sparse=PLANS[name]),
                importance=np.zeros((1, tokens), np.int64),
                record_importance=True,
            )
            backend.append(segment, 0, k, v)
            lists = backend.select(segment, 0, q, scale=SCALE)
            out = backend.attend(segment, 0, q, scale=SCALE, lists=lists)
            token = last_token(segment)
            chosen = backend.select(token, 0, q[-1:], scale=SCALE)
            decoded = backend.attend(token, 0, q[-1:], scale=SCALE, lists=chosen)
            outputs.append((out, decoded, segment.importance, chosen.indices))
    for other in outputs[1:]:
        for a, b in zip(outputs[0], other, strict=True):
            assert np.array_equal(a, b)


def test_equal_scores_go_to_the_lower_block(native):
    tokens = 32 * 12
    k = np.ones((tokens, 1, 32), np.float32)
    segment = empty_segment(tokens, kv_heads=1, k_type="q8_0", sparse=plan(k=5))
    native.append(segment, 0, k, k)
    lists = native.select(last_token(segment), 0, k[:1], scale=1.0)
    assert lists.indices.tolist() == [0, 1, 2, 10, 11]


# -- what it refuses -----------------------------------------------------------------------------


def test_unknown_and_missing_instruction_sets_are_named():
    with pytest.raises(ConfigError, match=r"isa: expected one of .*scalar.*'mmx'"):
        NativeBackend(isa="mmx")


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, 10**6])
def test_thread_counts_out_of_range(threads):
    with pytest.raises(ConfigError, match="threads: expected 1 to"):
        NativeBackend(threads=threads)


def test_arrays_of_the_wrong_shape_type_or_order_are_refused(native):
    segment = empty_segment(40)
    good = np.zeros((40, 2, 32), np.float32)
    for bad in (
        good[:39],
        good.astype(np.float64),
        np.zeros((40, 32, 2), np.float32).swapaxes(1, 2),
    ):
        with pytest.raises(ShapeError, match=r"\[append\] k: expected C-contiguous float32"):
            native.append(segment, 0, bad, good)


def test_segments_that_would_read_out_of_bounds_are_refused(native):
    segment = empty_segment(40)
    good = np.zeros((40, 2, 32), np.float32)
    for table in (
        np.array([0], np.int32),
        np.array([0, 99], np.int32),
        np.array([-1, 0], np.int32),
    ):
        with pytest.raises(ShapeError, match="block_table"):
            native.append(replace(segment, block_table=table), 0, good, good)
    with pytest.raises(ShapeError, match="importance"):
        native.append(replace(segment, importance=np.zeros((1, 39), np.int64)), 0, good, good)
    with pytest.raises(ShapeError, match="layer: expected 0 to 0, got 1"):
        native.append(segment, 1, good, good)


def test_queries_that_are_not_finite_are_refused(native):
    q, k, v = random_qkv(40, 4, 2)
    segment = empty_segment(40)
    native.append(segment, 0, k, v)
    q[3, 2, 1] = np.nan
    with pytest.raises(NumericalError, match="q: expected finite"):
        native.attend(segment, 0, q, scale=SCALE, lists=None)
