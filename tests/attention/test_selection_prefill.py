"""Each rule of docs/selection.md, section 6, on tiles of a prompt: a case that names it."""

from typing import Any

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.attention.selection import select_blocks
from tests.attention import naive
from tests.attention.plain import decoded, integers, lists_of, spikes


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
