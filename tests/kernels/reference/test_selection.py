"""Rules of docs/selection.md, 2, 3, 4 and 6, without a cache: scores, picks, gates, lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsieve.kernels.reference import selection as sel


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def naive_probe(scores: np.ndarray, importance: np.ndarray | None, k: int) -> set[int]:
    """Section 3, steps 2 to 4, one block at a time."""
    num_blocks = len(scores)
    reserved: list[int] = []
    if importance is not None:
        for _ in range(min((k + 1) // 2, num_blocks)):
            left = [b for b in range(num_blocks) if b not in reserved]
            reserved.append(max(left, key=lambda b: (importance[b], -b)))
    filled: list[int] = []
    while len(reserved) + len(filled) < min(k, num_blocks):
        left = [b for b in range(num_blocks) if b not in reserved + filled]
        filled.append(max(left, key=lambda b: (scores[b], -b)))
    if num_blocks - 1 not in reserved + filled and filled:
        filled.remove(min(filled, key=lambda b: (scores[b], -b)))
        filled.append(num_blocks - 1)
    return set(reserved + filled)


class TestProbePositions:
    @pytest.mark.parametrize(
        ("tokens", "expected"),
        [
            (9, list(range(9))),
            (31, list(range(0, 31, 3))),
            (32, [0, 4, 8, 12, 16, 20, 24, 28]),
            (1, [0]),
            (15, list(range(15))),
            (16, list(range(0, 16, 2))),
        ],
    )
    def test_one_block(self, tokens: int, expected: list[int]) -> None:
        positions, offsets = sel.probe_positions(tokens, block_size=32, num_probes=8)
        assert positions.tolist() == expected
        assert offsets.tolist() == [0]

    def test_the_open_block_is_sampled_by_its_own_length(self) -> None:
        positions, offsets = sel.probe_positions(32 + 31, block_size=32, num_probes=8)
        assert positions[:8].tolist() == list(range(0, 32, 4))
        assert positions[8:].tolist() == list(range(32, 63, 3))
        assert offsets.tolist() == [0, 8]

    def test_blocks_of_64(self) -> None:
        positions, offsets = sel.probe_positions(64 + 10, block_size=64, num_probes=8)
        assert positions.tolist() == [*range(0, 64, 8), *range(64, 74)]
        assert offsets.tolist() == [0, 8]


class TestProbeScores:
    def test_score_is_the_maximum_not_the_first_key(self) -> None:
        k = np.zeros((1, 64, 4), dtype=np.float32)
        k[0, 20, 0] = 5  # the needle in the middle of block 0, on a sampled position
        k[0, 32, 0] = 1  # first key of block 1
        q = np.zeros((1, 4), dtype=np.float32)
        q[0, 0] = 1
        assert sel.probe_scores(q, k, scale=0.5).tolist() == [[2.5, 0.5]]

    def test_only_sampled_keys_count(self) -> None:
        k = np.zeros((1, 32, 4), dtype=np.float32)
        k[0, 21, 0] = 5  # between samples
        q = np.ones((1, 4), dtype=np.float32)
        assert sel.probe_scores(q, k, scale=1.0).tolist() == [[0.0]]

    def test_against_float64(self) -> None:
        rng = np.random.default_rng(1)
        q = rng.standard_normal((6, 16), dtype=np.float32)
        k = rng.standard_normal((2, 75, 16), dtype=np.float32)
        got = sel.probe_scores(q, k, scale=0.25, block_size=32, num_probes=8)
        for head in range(6):
            logits = k[head // 3].astype(np.float64) @ q[head].astype(np.float64) * 0.25
            want = [logits[0:32:4].max(), logits[32:64:4].max(), logits[64:75].max()]
            np.testing.assert_allclose(got[head], want, rtol=1e-5, atol=1e-6)


class TestPickProbe:
    def test_reserve_takes_half_rounded_up(self) -> None:
        scores = f32(0, 1, 2, 3, 4, 5, 6, 7)
        importance = i64(9, 8, 7, 6, 0, 0, 0, 0)
        assert sel.pick_probe(scores, importance, 5).tolist() == [0, 1, 2, 6, 7]
        assert sel.pick_probe(scores, importance, 4).tolist() == [0, 1, 6, 7]

    def test_ties_go_to_the_lower_index(self) -> None:
        equal = f32(1, 1, 1, 1, 1)
        assert sel.pick_probe(equal, i64(3, 3, 3, 3, 3), 3).tolist() == [0, 1, 4]
        assert sel.pick_probe(equal, None, 3).tolist() == [0, 1, 4]

    def test_reserved_block_is_not_filled_again(self) -> None:
        assert sel.pick_probe(f32(9, 1, 2, 3, 4), i64(5, 0, 0, 0, 0), 2).tolist() == [0, 4]

    def test_last_block_replaces_the_worst_filled_one(self) -> None:
        assert sel.pick_probe(f32(5, 4, 3, 0), None, 3).tolist() == [0, 1, 3]

    def test_among_equally_bad_the_highest_index_leaves(self) -> None:
        assert sel.pick_probe(f32(5, 3, 3, 0), None, 3).tolist() == [0, 1, 3]

    def test_reserved_blocks_are_never_evicted(self) -> None:
        scores, importance = f32(0, 5, 4, -9), i64(7, 0, 0, 0)
        assert sel.pick_probe(scores, importance, 2).tolist() == [0, 3]

    def test_k1_with_importance_loses_the_last_block(self) -> None:
        assert sel.pick_probe(f32(1, 2, 3), i64(5, 9, 0), 1).tolist() == [1]

    def test_k1_without_importance_is_the_last_block(self) -> None:
        assert sel.pick_probe(f32(3, 2, 1), None, 1).tolist() == [2]

    @pytest.mark.parametrize("k", [1, 3, 5])
    def test_att_06_odd_budgets_add_up(self, k: int) -> None:
        rng = np.random.default_rng(k)
        got = sel.pick_probe(rng.standard_normal(9).astype(np.float32), rng.integers(0, 99, 9), k)
        assert len(got) == k == len(set(got.tolist()))

    @pytest.mark.parametrize("k", [4, 5, 100])
    def test_att_06_budget_beyond_the_blocks_takes_all(self, k: int) -> None:
        for importance in (None, i64(1, 2, 3, 4)):
            got = sel.pick_probe(f32(4, 3, 2, 1), importance, k)
            assert got.tolist() == [0, 1, 2, 3]
        assert sel.pick_even(f32(4, 3, 2, 1), k).tolist() == [0, 1, 2, 3]

    @given(
        data=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), min_size=1, max_size=12),
        k=st.integers(1, 14),
        with_importance=st.booleans(),
    )
    def test_against_the_rule_one_block_at_a_time(
        self, data: list[tuple[int, int]], k: int, with_importance: bool
    ) -> None:
        scores = f32(*(score for score, _ in data))
        importance = i64(*(mass for _, mass in data)) if with_importance else None
        got = sel.pick_probe(scores, importance, k)
        assert got.tolist() == sorted(naive_probe(scores, importance, k))
        assert got.dtype == np.int32


class TestPickEven:
    @pytest.mark.parametrize(
        ("k", "expected"),
        [(1, [5]), (2, [0, 5]), (3, [0, 4, 5]), (4, [0, 2, 4, 5]), (5, [0, 1, 2, 4, 5])],
    )
    def test_guards_in_order_of_precedence(self, k: int, expected: list[int]) -> None:
        assert sel.pick_even(f32(-9, 1, 9, 0, -9, -9), k).tolist() == expected

    def test_ties_go_to_the_lower_index(self) -> None:
        assert sel.pick_even(f32(1, 1, 1, 1, 1, 1), 4).tolist() == [0, 1, 4, 5]

    def test_coinciding_guards_free_their_place(self) -> None:
        assert sel.pick_even(f32(1, 1), 3).tolist() == [0, 1]
        assert sel.pick_even(f32(1), 3).tolist() == [0]


class TestPickPrefill:
    @pytest.mark.parametrize(
        ("k", "expected"),
        [(1, [5]), (2, [4, 5]), (3, [0, 4, 5]), (4, [0, 2, 4, 5]), (9, [0, 1, 2, 3, 4, 5])],
    )
    def test_own_block_then_previous_then_sink(self, k: int, expected: list[int]) -> None:
        assert sel.pick_prefill(f32(-9, 1, 9, 0, -9), k).tolist() == expected

    @given(st.lists(st.integers(-3, 3), max_size=10), st.integers(1, 12))
    def test_causal_unique_and_within_budget(self, scores: list[int], k: int) -> None:
        got = sel.pick_prefill(f32(*scores), k).tolist()
        assert got == sorted(set(got))
        assert len(got) == min(k, len(scores) + 1)
        assert got[-1] == len(scores)


class TestMerge:
    def test_heads_are_measured_from_their_own_best_block(self) -> None:
        # Head 0 has large logits; without centring, head 1's favourite (block 1) would lose.
        scores = np.array([[[100, 90, 95, 99], [1, 5, 2, 0]]], dtype=np.float32)
        assert sel.merge_group(scores, num_full=4).tolist() == [[0, 0, -3, -1]]

    def test_the_open_block_is_left_out_of_the_maximum(self) -> None:
        scores = np.array([[1, 3, 50], [2, 0, 0]], dtype=np.float32)
        assert sel.merge_group(scores, num_full=2).tolist() == [0, 0, 47]

    def test_a_full_last_block_counts(self) -> None:
        scores = np.array([[1, 3, 50], [2, 0, 0]], dtype=np.float32)
        assert sel.merge_group(scores, num_full=3).tolist() == [0, -2, 0]

    def test_an_open_block_alone(self) -> None:
        assert sel.merge_group(np.array([[4], [7]], dtype=np.float32), num_full=0).tolist() == [0]

    def test_tile_includes_every_row_and_every_block(self) -> None:
        scores = np.array([[7, 1, 2], [0, 1, 4], [3, 3, 0]], dtype=np.float32)
        assert sel.merge_tile(scores).tolist() == [0, 0, 0]
        assert sel.merge_tile(scores[:2]).tolist() == [0, -3, 0]


class TestPrefillScores:
    def test_against_float64(self) -> None:
        rng = np.random.default_rng(2)
        q = rng.standard_normal((4, 5, 16), dtype=np.float32)
        k = rng.standard_normal((2, 100, 16), dtype=np.float32)
        got = sel.prefill_scores(q, k, num_blocks=3, scale=0.25)
        for kv_head in range(2):
            want = np.full(3, -np.inf)
            for head in (2 * kv_head, 2 * kv_head + 1):
                for row in range(5):
                    logits = k[kv_head, :96].astype(np.float64) @ q[head, row] * 0.25
                    scores = logits.reshape(3, 8, 4)[:, :, 0].max(axis=1)
                    want = np.maximum(want, scores - scores.max())
            np.testing.assert_allclose(got[kv_head], want, rtol=1e-5, atol=1e-5)

    def test_later_tokens_do_not_matter(self) -> None:
        rng = np.random.default_rng(3)
        q = rng.standard_normal((2, 32, 16), dtype=np.float32)
        k = rng.standard_normal((1, 160, 16), dtype=np.float32)
        before = sel.prefill_scores(q, k, num_blocks=3, scale=1.0)
        k[:, 96:] = 1e30
        assert np.array_equal(before, sel.prefill_scores(q, k, num_blocks=3, scale=1.0))


class TestGate:
    def test_decode(self) -> None:
        assert not sel.decode_is_sparse(64, 1)
        assert sel.decode_is_sparse(65, 1)
        assert not sel.decode_is_sparse(96, 3)
        assert sel.decode_is_sparse(97, 3)  # 4 blocks: the open one counts
        assert not sel.decode_is_sparse(97, 4)
        assert not sel.decode_is_sparse(128, 2, block_size=64)
        assert sel.decode_is_sparse(129, 2, block_size=64)

    def test_prefill(self) -> None:
        assert not sel.tile_is_sparse(1, 1, exact_from_tile=9)
        assert sel.tile_is_sparse(2, 1, exact_from_tile=9)
        assert not sel.tile_is_sparse(3, 4, exact_from_tile=9)
        assert sel.tile_is_sparse(4, 4, exact_from_tile=9)
        assert not sel.tile_is_sparse(4, 4, exact_from_tile=4)
        assert not sel.tile_is_sparse(5, 3, exact_from_tile=9, block_size=64)
        assert sel.tile_is_sparse(6, 3, exact_from_tile=9, block_size=64)


class TestLists:
    def test_example_of_section_6(self) -> None:
        rows = [np.array(row, dtype=np.int32) for row in ([0], [0, 1], [0, 2])]
        lists = sel.block_lists(rows, num_heads=1)
        assert lists.indptr.tolist() == [0, 1, 3, 5]
        assert lists.indices.tolist() == [0, 0, 1, 0, 2]
        assert (lists.num_heads, lists.num_tiles) == (1, 3)
        assert (lists.indptr.dtype, lists.indices.dtype) == (np.int64, np.int32)

    def test_expansion_is_clipped_to_causal_blocks(self) -> None:
        selected = np.array([0, 2], dtype=np.int32)
        got = sel.expand_blocks(selected, block_size=64, num_blocks=5)
        assert got.tolist() == [0, 1, 4]
        assert got.dtype == np.int32

    def test_importance_sums_count_every_token(self) -> None:
        importance = np.zeros(70, dtype=np.int64)
        importance[[1, 31, 33, 69]] = [5, 2**40, 3, 4]  # none on a sampled position
        assert sel.importance_block_sums(importance).tolist() == [2**40 + 5, 3, 4]
        assert sel.importance_block_sums(importance, 64).tolist() == [2**40 + 8, 4]
