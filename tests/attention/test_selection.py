"""`select_blocks`: every rule of selection.md, sections 2 to 6, on plain arrays.

The property tests compare with `naive.py`; each rule also has a small case that names it.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.config import SparseAttention
from kvsieve.attention.selection import select_blocks
from kvsieve.errors import ConfigError, NumericalError, ShapeError
from tests.attention import naive

UNIT = 2**24


def integers(seed: int, *shape: int) -> np.ndarray:
    """Small integers as float32: their scores are exact, and often equal."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def spikes(n: int, at: dict[int, float]) -> np.ndarray:
    """Keys ``[1, n, 1]`` of zeros with the given values; with q = 1 they are the logits."""
    k = np.zeros((1, n, 1), dtype=np.float32)
    for position, value in at.items():
        k[0, position, 0] = value
    return k


def decoded(
    keys: np.ndarray, /, *, importance: np.ndarray | None = None, **options: Any
) -> list[int]:
    """Blocks of one query head whose query is 1."""
    q = np.ones((1, 1, 1), dtype=np.float32)
    mask = select_blocks(
        q, keys, sparse=SparseAttention(**options), importance=importance, scale=1.0
    )
    return mask.blocks(0).tolist()


def lists_of(mask: BlockMask) -> naive.Lists:
    return [
        [mask.blocks(head, tile).tolist() for tile in range(mask.num_tiles)]
        for head in range(mask.num_heads)
    ]


class TestAgainstTheNaiveRules:
    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        n=st.integers(1, 400),
        k=st.integers(1, 9),
        heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
        selector=st.sampled_from(["probe", "even"]),
        share=st.sampled_from(["head", "group"]),
        shape=st.sampled_from([(32, 8), (32, 3), (32, 32), (64, 8), (96, 5)]),
        with_importance=st.booleans(),
    )
    def test_decode(
        self, *, seed: int, n: int, k: int, heads: tuple[int, int], selector: str, share: str,
        shape: tuple[int, int], with_importance: bool,
    ) -> None:  # fmt: skip
        block, num_probes = shape
        q, keys = integers(seed, heads[0], 1, 3), integers(seed + 1, heads[1], n, 3)
        importance = np.random.default_rng(seed).integers(0, 3, n) if with_importance else None
        mask = select_blocks(
            q,
            keys,
            sparse=SparseAttention(
                k=k, block_size=block, num_probes=num_probes, selector=selector, share=share  # type: ignore[arg-type]
            ),
            importance=importance,
            scale=0.5,
        )  # fmt: skip
        assert lists_of(mask) == naive.decode(
            q[:, 0], keys, k=k, selector=selector, share=share, scale=0.5, block=block,
            num_probes=num_probes, importance=importance,
        )  # fmt: skip

    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        n=st.integers(2, 330),
        first_tile=st.integers(0, 5),
        k=st.integers(1, 7),
        heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
        selector=st.sampled_from(["probe", "even"]),
        shape=st.sampled_from([(32, 8), (32, 3), (64, 8)]),
        dense_tail=st.sampled_from([0, 31, 64, 1000]),
    )
    def test_prefill(
        self, *, seed: int, n: int, first_tile: int, k: int, heads: tuple[int, int],
        selector: str, shape: tuple[int, int], dense_tail: int,
    ) -> None:  # fmt: skip
        start = min(first_tile, (n - 1) // 32) * 32
        q, keys = integers(seed, heads[0], n - start, 3), integers(seed + 1, heads[1], n, 3)
        sparse = SparseAttention(
            k=k, block_size=shape[0], num_probes=shape[1], selector=selector, dense_tail=dense_tail  # type: ignore[arg-type]
        )  # fmt: skip
        mask = select_blocks(q, keys, sparse=sparse, prompt_len=n, scale=0.5)
        assert lists_of(mask) == naive.prefill(
            q, keys, k=k, scale=0.5, block=shape[0], num_probes=shape[1],
            exact_from=max(0, n - dense_tail) // 32,
        )  # fmt: skip


class TestGate:
    """Section 2, and ATT-06: nothing is dropped while everything fits the budget."""

    @pytest.mark.parametrize(
        ("n", "k", "sparse"),
        [
            (64, 1, False),  # not more than two blocks of tokens
            (65, 1, True),
            (65, 2, True),
            (65, 3, False),  # 3 blocks fit a budget of 3
            (96, 3, False),
            (97, 3, True),
            (97, 4, False),  # ceil(97 / 32) = 4 blocks, none of them dropped
            *((n, 2, False) for n in (1, 10, 31, 32, 33, 50, 64)),
            (97, 10**6, False),
        ],
    )
    @pytest.mark.parametrize("selector", ["probe", "even"])
    def test_decode(self, n: int, k: int, sparse: bool, selector: str) -> None:
        blocks = decoded(spikes(n, {}), k=k, selector=selector)
        assert len(blocks) == (k if sparse else -(-n // 32))

    def test_an_exact_token_has_one_list_per_kv_head(self) -> None:
        mask = select_blocks(
            integers(0, 4, 1, 8), integers(1, 2, 97, 8), sparse=SparseAttention(k=4)
        )
        assert mask == BlockMask.full(q_len=1, kv_len=97, num_kv_heads=2)

    @pytest.mark.parametrize(("k", "first_sparse"), [(1, 2), (2, 2), (3, 3), (5, 5)])
    def test_prefill_tiles(self, k: int, first_sparse: int) -> None:
        mask = select_blocks(
            integers(0, 1, 320, 4),
            integers(1, 1, 320, 4),
            sparse=SparseAttention(k=k, dense_tail=0),
        )
        lengths = [len(mask.blocks(0, tile)) for tile in range(10)]
        assert lengths == [min(tile + 1, k if tile >= first_sparse else 10) for tile in range(10)]

    @pytest.mark.parametrize(("phase", "decode", "prefill"), [
        ("both", 2, 2), ("decode", 2, 10), ("prefill", 10, 2),
    ])  # fmt: skip
    def test_phase(self, phase: str, decode: int, prefill: int) -> None:
        sparse = SparseAttention(k=2, dense_tail=0, phase=phase)  # type: ignore[arg-type]
        q, k = integers(0, 1, 320, 4), integers(1, 1, 320, 4)
        assert len(select_blocks(q[:, -1:], k, sparse=sparse).blocks(0)) == decode
        assert len(select_blocks(q, k, sparse=sparse).blocks(0, 9)) == prefill


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


class TestPrefill:
    """Section 6."""

    def tile(
        self, keys: np.ndarray, q: np.ndarray | None = None, /, *, tile: int, **options: Any
    ) -> list[int]:
        rows = np.ones((1, keys.shape[1], 1), dtype=np.float32) if q is None else q
        sparse = SparseAttention(**{"dense_tail": 0, "selector": "even", **options})
        return select_blocks(rows, keys, sparse=sparse, scale=1.0).blocks(0, tile).tolist()

    @pytest.mark.parametrize("selector", ["probe", "even"])
    @pytest.mark.parametrize(("k", "expected"), [
        (1, [8]), (2, [7, 8]), (3, [0, 7, 8]), (4, [0, 5, 7, 8]), (5, [0, 2, 5, 7, 8]),
    ])  # fmt: skip
    def test_diagonal_then_the_one_before_then_the_sink(
        self, k: int, expected: list[int], selector: str
    ) -> None:
        keys = spikes(320, {5 * 32: 3.0, 2 * 32: 2.0, 0: -9.0, 7 * 32: -9.0})
        assert self.tile(keys, tile=8, k=k, selector=selector) == expected

    def test_importance_reserves_nothing(self) -> None:
        keys, importance = spikes(320, {5 * 32: 3.0}), np.zeros(320)
        importance[2 * 32] = 9.0
        q = np.ones((1, 320, 1), dtype=np.float32)
        mask = select_blocks(
            q, keys, sparse=SparseAttention(k=4, dense_tail=0), importance=importance
        )
        assert mask.blocks(0, 8).tolist() == [0, 5, 7, 8]

    def test_a_future_block_does_not_push_a_past_one_out(self) -> None:
        """Causality comes before top-k."""
        past = {2 * 32: 1.0}
        future = {32 * b: 100.0 for b in range(6, 10)}
        assert self.tile(spikes(320, {**past, **future}), tile=5, k=4) == [0, 2, 4, 5]

    def test_the_tiles_own_keys_do_not_count_in_the_maximum(self) -> None:
        """Row 1 wants past block 2 most, and its own block far more, which is in anyway."""
        k = np.zeros((1, 320, 2), dtype=np.float32)
        k[0, 3 * 32, 0], k[0, 4 * 32, 0], k[0, 2 * 32, 1] = 100.0, 90.0, 1.0
        k[0, 8 * 32 : 9 * 32, 1] = 1000.0
        q = np.zeros((1, 320, 2), dtype=np.float32)
        q[0, 8 * 32 : 9 * 32, 0] = 1.0
        q[0, 8 * 32 + 1] = (0.0, 1.0)
        assert self.tile(k, q, tile=8, k=5) == [0, 2, 3, 7, 8]

    def test_guards_count_in_the_maximum(self) -> None:
        """Row 1's best past block is a guard, so what it wants next is far from its best."""
        k = np.zeros((1, 320, 2), dtype=np.float32)
        k[0, 3 * 32, 0], k[0, 4 * 32, 0], k[0, 2 * 32, 1] = 100.0, 90.0, 1.0
        k[0, 7 * 32, 1] = 1000.0
        q = np.zeros((1, 320, 2), dtype=np.float32)
        q[0, 8 * 32 : 9 * 32, 0] = 1.0
        q[0, 8 * 32 + 1] = (0.0, 1.0)
        assert self.tile(k, q, tile=8, k=5) == [0, 3, 4, 7, 8]

    @pytest.mark.parametrize("row", [0, 1, 17, 31])
    @pytest.mark.parametrize("head", [0, 1])
    def test_every_row_and_every_head_of_the_group_counts(self, row: int, head: int) -> None:
        k = np.zeros((1, 320, 1), dtype=np.float32)
        k[0, 4 * 32] = 1.0
        q = np.zeros((2, 320, 1), dtype=np.float32)
        q[:, 8 * 32 : 9 * 32] = -1.0  # the other rows want every block but 4
        q[head, 8 * 32 + row] = 1.0
        k[0, 1 * 32] = -1e-3
        assert 4 in self.tile(k, q, tile=8, k=5)

    @pytest.mark.parametrize(("prompt", "tail", "first_exact"), [
        (320, 0, 10), (320, 128, 6), (320, 100, 6), (320, 97, 6), (320, 96, 7), (320, 1000, 0),
        (300, 0, 9), (300, 44, 8), (300, 45, 7),
    ])  # fmt: skip
    def test_exact_tail(self, prompt: int, tail: int, first_exact: int) -> None:
        sparse = SparseAttention(k=1, dense_tail=tail)
        mask = select_blocks(integers(0, 1, prompt, 4), integers(1, 1, prompt, 4), sparse=sparse)
        for tile in range(2, -(-prompt // 32)):
            assert len(mask.blocks(0, tile)) == (tile + 1 if tile >= first_exact else 1)

    @pytest.mark.parametrize("edges", [[32], [64, 128], [160], [32, 64, 96, 128, 160, 192]])
    @pytest.mark.parametrize("prompt", [193, 210])
    def test_any_chunking_gives_the_same_tiles(self, edges: list[int], prompt: int) -> None:
        """Also a last chunk of a single token, which is a prompt token by `prompt_len`."""
        q, k = integers(0, 4, prompt, 8), integers(1, 2, prompt, 8)
        sparse = SparseAttention(k=3, dense_tail=64)
        whole = lists_of(select_blocks(q, k, sparse=sparse))
        pieces: naive.Lists = [[], []]
        for start, stop in zip([0, *edges], [*edges, prompt], strict=True):
            mask = select_blocks(q[:, start:stop], k[:, :stop], sparse=sparse, prompt_len=prompt)
            for head, tiles in enumerate(lists_of(mask)):
                pieces[head].extend(tiles)
        assert pieces == whole

    def test_later_tiles_change_no_earlier_list(self) -> None:
        q, k = integers(0, 4, 320, 8), integers(1, 2, 320, 8)
        sparse = SparseAttention(k=3, dense_tail=32)
        before = lists_of(select_blocks(q, k, sparse=sparse))
        for tile in range(1, 10):
            q2, k2 = q.copy(), k.copy()
            q2[:, tile * 32 :], k2[:, tile * 32 :] = 1e6, -1e6
            after = lists_of(select_blocks(q2, k2, sparse=sparse))
            assert [head[:tile] for head in after] == [head[:tile] for head in before]


class TestWiderBlocks:
    """`block_size` a multiple of 32: chosen in aligned groups, listed as blocks of 32."""

    def test_k_counts_groups(self) -> None:
        blocks = decoded(spikes(330, {2 * 64 + 8: 5.0}), k=3, block_size=64, selector="even")
        assert blocks == [0, 1, 8, 9, 10]
        blocks = decoded(spikes(330, {2 * 64 + 8: 5.0}), k=4, block_size=64, selector="even")
        assert blocks == [0, 1, 4, 5, 8, 9, 10]

    def test_the_gate_counts_groups(self) -> None:
        assert decoded(spikes(192, {}), k=3, block_size=64) == list(range(6))
        assert len(decoded(spikes(193, {}), k=3, block_size=64)) < 7

    def test_prefill_lists_stop_at_the_tile(self) -> None:
        q, k = integers(0, 1, 320, 4), integers(1, 1, 320, 4)
        mask = select_blocks(q, k, sparse=SparseAttention(k=2, block_size=64, dense_tail=0))
        assert mask.blocks(0, 8).tolist() == [6, 7, 8]
        assert mask.blocks(0, 9).tolist() == [6, 7, 8, 9]


def test_the_same_blocks_again_and_again() -> None:
    q, k = integers(0, 4, 1, 16), integers(1, 2, 999, 16)
    sparse = SparseAttention(k=7)
    masks = {select_blocks(q.copy(), k.copy(), sparse=sparse) for _ in range(3)}
    assert len(masks) == 1


def test_what_lies_behind_the_arrays_is_not_read() -> None:
    """Views into larger arrays that hold NaN and huge values around them."""
    wide = np.full((2, 320, 12), np.nan, dtype=np.float32)
    k = wide[:, 8:305, 2:10]
    k[:] = integers(1, 2, 297, 8)
    q = integers(0, 4, 1, 8)
    sparse = SparseAttention(k=4)
    assert select_blocks(q, k, sparse=sparse) == select_blocks(q, k.copy(), sparse=sparse)


class TestErrors:
    @pytest.mark.parametrize(
        ("q_len", "kv_len", "prompt_len", "message"),
        [
            (10, 47, None, "whole tiles of 32 prompt positions .* positions 37 to 46"),
            (32, 50, None, "positions 18 to 49"),
            (18, 50, 60, "positions 32 to 49"),  # a chunk that ends inside a tile
            (2, 66, 64, "one query beyond the prompt of 64 tokens"),
        ],
    )
    def test_pieces_of_prompts(
        self, q_len: int, kv_len: int, prompt_len: int | None, message: str
    ) -> None:
        with pytest.raises(ShapeError, match=message):
            select_blocks(
                integers(0, 1, q_len, 4),
                integers(1, 1, kv_len, 4),
                sparse=SparseAttention(),
                prompt_len=prompt_len,
            )

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"importance": np.zeros(99)}, ShapeError, r"importance: expected \[Tkv=100\]"),
            (
                {"importance": np.zeros(100, dtype=np.int8)},
                ShapeError,
                "importance: expected float or int64, got int8",
            ),
            ({"importance": np.full(100, -1.0)}, ConfigError, "importance: .* negative"),
            ({"importance": np.full(100, np.nan)}, NumericalError, "importance: expected finite"),
            ({"prompt_len": 0}, ConfigError, "prompt_len: expected a positive integer, got 0"),
            ({"scale": np.inf}, ConfigError, "scale: expected a finite number"),
        ],
    )
    def test_options(self, options: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=rf"\[select_blocks\] {message}"):
            select_blocks(
                integers(0, 2, 1, 4), integers(1, 1, 100, 4), sparse=SparseAttention(), **options
            )

    def test_heads_that_do_not_divide(self) -> None:
        with pytest.raises(ShapeError, match="multiple of num_kv_heads=2 query heads, got 3"):
            select_blocks(integers(0, 3, 1, 4), integers(1, 2, 99, 4), sparse=SparseAttention())

    def test_nan_keys(self) -> None:
        k = integers(1, 1, 99, 4)
        k[0, 3, 2] = np.nan
        with pytest.raises(NumericalError, match=r"\[select_blocks\] k: expected finite"):
            select_blocks(integers(0, 1, 1, 4), k, sparse=SparseAttention())
