"""Each rule of docs/selection.md, sections 3 and 4, on a decoded token: a case that names it."""

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.attention.selection import select_blocks
from tests.attention.plain import decoded, lists_of, spikes

UNIT = 2**24


class TestProbe:
    """Section 3."""

    def test_a_score_is_the_maximum_of_the_sampled_keys(self) -> None:
        """The needle may sit in the middle of a block, behind a low first key."""
        keys = spikes(160, {32: -5.0, 32 + 20: 2.0, 64: 1.0})
        assert decoded(keys, k=2) == [1, 4]

    def test_a_key_between_the_samples_is_not_seen(self) -> None:
        keys = spikes(160, {32 + 21: 2.0, 64: 1.0})
        assert decoded(keys, k=2) == [2, 4]

    @pytest.mark.parametrize(("k", "reserved"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
    def test_half_of_the_budget_rounded_up_is_reserved(self, k: int, reserved: int) -> None:
        """Importance wants blocks 5, 4, 3, ...; scores want 0, 1, 2, ..."""
        keys = spikes(320, {32 * b: 20.0 - b for b in range(10)})
        importance = np.zeros(320)
        importance[[32 * b + 7 for b in range(1, 6)]] = [1, 2, 3, 4, 5]
        blocks = decoded(keys, k=k, importance=importance)
        assert sum(b in (3, 4, 5) for b in blocks) == reserved
        assert len(blocks) == k  # the two halves add up to the budget

    def test_importance_is_summed_over_all_tokens_of_a_block(self) -> None:
        """Many small shares on unsampled tokens outweigh one large one."""
        importance = np.zeros(160)
        importance[32] = 0.9
        importance[[64 + i for i in (1, 2, 3, 5)]] = 0.25
        assert decoded(spikes(160, {}), k=1, importance=importance) == [2]

    def test_equal_importance_goes_to_the_lower_index(self) -> None:
        importance = np.zeros(160)
        importance[[70, 100]] = 0.5
        assert decoded(spikes(160, {}), k=1, importance=importance) == [2]

    def test_a_block_wanted_twice_is_counted_once_and_its_place_refilled(self) -> None:
        keys = spikes(160, {32: 9.0, 64: 8.0, 0: 7.0})
        importance = np.zeros(160)
        importance[32] = 1.0
        assert decoded(keys, k=3, importance=importance) == [0, 1, 4]
        assert decoded(keys, k=4, importance=importance) == [0, 1, 2, 4]

    def test_equal_scores_go_to_the_lower_index(self) -> None:
        assert decoded(spikes(160, {}), k=3) == [0, 1, 4]

    def test_the_last_block_replaces_the_lowest_scoring_filled_block(self) -> None:
        assert decoded(spikes(160, {0: 3.0, 32: 1.0, 64: 2.0}), k=3) == [0, 2, 4]

    def test_of_equally_low_blocks_the_highest_index_makes_room(self) -> None:
        assert decoded(spikes(160, {0: 1.0, 32: 1.0, 96: 2.0}), k=3) == [0, 3, 4]

    def test_a_last_block_that_was_chosen_by_score_evicts_nobody(self) -> None:
        assert decoded(spikes(160, {128: 9.0, 32: 1.0}), k=2) == [1, 4]

    def test_reserved_blocks_are_never_evicted(self) -> None:
        importance = np.zeros(160)
        importance[[0, 32]] = 1.0
        keys = spikes(160, {0: -9.0, 32: -9.0, 64: 5.0})
        assert decoded(keys, k=3, importance=importance) == [0, 1, 4]

    def test_k_1_with_importance_loses_the_last_block(self) -> None:
        """The original's failure mode, kept on purpose."""
        importance = np.zeros(160)
        importance[70] = 1.0
        assert decoded(spikes(160, {128: 50.0}), k=1, importance=importance) == [2]

    def test_k_1_without_importance_reads_the_last_block(self) -> None:
        assert decoded(spikes(160, {32: 50.0}), k=1) == [4]

    def test_importance_in_units_and_as_floats(self) -> None:
        keys = spikes(160, {})
        tiny = np.zeros(160, dtype=np.int64)
        tiny[70] = 1
        assert decoded(keys, k=1, importance=tiny) == [2]
        assert decoded(keys, k=1, importance=tiny / UNIT) == [2]
        assert decoded(keys, k=1, importance=tiny / UNIT / 4) == [0]  # below half a unit

    def test_no_other_guard(self) -> None:
        assert decoded(spikes(160, {32: 2.0, 64: 3.0}), k=3) == [1, 2, 4]


class TestEven:
    """Section 4."""

    @pytest.mark.parametrize(("k", "expected"), [
        (1, [9]), (2, [0, 9]), (3, [0, 8, 9]), (4, [0, 5, 8, 9]), (5, [0, 2, 5, 8, 9]),
    ])  # fmt: skip
    def test_guards_in_their_order_then_scores(self, k: int, expected: list[int]) -> None:
        keys = spikes(320, {5 * 32: 3.0, 2 * 32: 2.0, 0: -9.0, 8 * 32: -9.0, 9 * 32: -9.0})
        assert decoded(keys, k=k, selector="even") == expected

    def test_no_reserve(self) -> None:
        importance = np.zeros(320)
        importance[3 * 32] = 50.0
        keys = spikes(320, {5 * 32: 3.0})
        assert decoded(keys, k=4, selector="even", importance=importance) == [0, 5, 8, 9]

    def test_ties_go_to_the_lower_index(self) -> None:
        assert decoded(spikes(320, {}), k=5, selector="even") == [0, 1, 2, 8, 9]


class TestShare:
    """Section 4: one selection per query head, or one per group of heads."""

    def queries(self) -> tuple[np.ndarray, np.ndarray]:
        """Head 0 reads dimension 0 (large logits), head 1 dimension 1 (small ones)."""
        k = np.zeros((1, 305, 2), dtype=np.float32)
        k[0, 3 * 32] = (100.0, 0.0)
        k[0, 4 * 32] = (90.0, 0.0)
        k[0, 6 * 32] = (0.0, 1.0)
        return np.eye(2, dtype=np.float32)[:, None], k

    def test_each_head_its_own_list(self) -> None:
        q, k = self.queries()
        mask = select_blocks(q, k, sparse=SparseAttention(k=4, selector="even"), scale=1.0)
        assert (mask.num_kv_heads, mask.lists_per_kv_head, mask.num_heads) == (1, 2, 2)
        assert lists_of(mask) == [[[0, 3, 8, 9]], [[0, 6, 8, 9]]]

    def test_a_group_compares_distances_from_each_heads_best(self) -> None:
        """Both heads' favourites win; by raw score block 4 would push block 6 out."""
        q, k = self.queries()
        sparse = SparseAttention(k=5, selector="even", share="group")
        mask = select_blocks(q, k, sparse=sparse, scale=1.0)
        assert mask.lists_per_kv_head == 1
        assert lists_of(mask) == [[[0, 3, 6, 8, 9]]]

    def test_the_open_block_is_left_out_of_the_maximum(self) -> None:
        """Head 1's huge logit in the open block must not push its other wishes down."""
        q, k = self.queries()
        k[0, 304] = (0.0, 500.0)
        sparse = SparseAttention(k=5, selector="even", share="group")
        assert lists_of(select_blocks(q, k, sparse=sparse, scale=1.0)) == [[[0, 3, 6, 8, 9]]]

    def test_guards_count_in_the_maximum(self) -> None:
        """Head 1's best block is the sink: its next best is far behind, head 0's is not."""
        q, k = self.queries()
        k[0, 0] = (0.0, 500.0)
        sparse = SparseAttention(k=5, selector="even", share="group")
        assert lists_of(select_blocks(q, k, sparse=sparse, scale=1.0)) == [[[0, 3, 4, 8, 9]]]

    def test_heads_are_grouped_by_kv_head(self) -> None:
        """ATT-09: query heads 0 and 1 read KV head 0, heads 2 and 3 KV head 1."""
        k = np.zeros((2, 305, 1), dtype=np.float32)
        k[0, 3 * 32], k[1, 6 * 32] = 5.0, 5.0
        q = np.ones((4, 1, 1), dtype=np.float32)
        mask = select_blocks(q, k, sparse=SparseAttention(k=4, selector="even"), scale=1.0)
        assert [blocks[0][1] for blocks in lists_of(mask)] == [3, 3, 6, 6]
