"""`BlockMask`: its CSR form, what it refuses, and what it means on tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.attention.block_mask import BlockMask
from kvsieve.errors import ConfigError, ShapeError


@st.composite
def block_masks(draw: st.DrawFn, *, block: int | None = None) -> BlockMask:
    size = block or draw(st.sampled_from([1, 3, 4, 32]))
    q_len = draw(st.integers(1, 5 * size))
    kv_len = q_len + draw(st.integers(0, 3 * size))
    lists_per_kv_head = draw(st.integers(1, 2))
    heads = lists_per_kv_head * draw(st.integers(1, 2))
    tiles = range((kv_len - q_len) // size, -(-kv_len // size))
    row = [st.sets(st.integers(0, tile), min_size=1) for tile in tiles]
    return BlockMask.from_lists(
        [[draw(tile) for tile in row] for _ in range(heads)],
        q_len=q_len,
        kv_len=kv_len,
        block_size=size,
        lists_per_kv_head=lists_per_kv_head,
    )


def mask_of(indptr: list[int], indices: list[int], **sizes: int) -> BlockMask:
    """Three tiles of one head unless told otherwise."""
    return BlockMask(
        indptr=np.array(indptr),
        indices=np.array(indices),
        **{"num_kv_heads": 1, "num_tiles": 3, "q_len": 96, "kv_len": 96, **sizes},
    )


EXAMPLE = mask_of([0, 1, 3, 5], [0, 0, 1, 0, 2])
"""docs/selection.md, section 6: rows 0: {0}, 1: {0, 1}, 2: {0, 2}."""


class TestCsr:
    def test_the_example(self) -> None:
        assert BlockMask.from_lists([[[0], [0, 1], [0, 2]]], q_len=96, kv_len=96) == EXAMPLE
        assert EXAMPLE.indptr.tolist() == [0, 1, 3, 5]
        assert EXAMPLE.indices.tolist() == [0, 0, 1, 0, 2]
        assert (EXAMPLE.indptr.dtype, EXAMPLE.indices.dtype) == (np.int64, np.int32)
        assert [EXAMPLE.blocks(0, tile).tolist() for tile in range(3)] == [[0], [0, 1], [0, 2]]

    def test_row_order_is_head_then_tile(self) -> None:
        mask = BlockMask.from_lists([[[0], [1]], [[0], [0, 1]]], q_len=64, kv_len=64)
        assert mask.indices.tolist() == [0, 1, 0, 0, 1]
        assert mask.num_kv_heads == 2
        assert mask.blocks(1, 1).tolist() == [0, 1]

    def test_lists_are_sorted_and_deduplicated(self) -> None:
        mask = BlockMask.from_lists([[[0], [1, 0, 1], [2, 0, 2]]], q_len=96, kv_len=96)
        assert mask.indices.tolist() == [0, 0, 1, 0, 2]

    def test_it_cannot_be_changed_afterwards(self) -> None:
        indices = np.array([0, 0, 1, 0, 2])
        mask = BlockMask(
            indptr=np.array([0, 1, 3, 5]),
            indices=indices,
            num_kv_heads=1,
            num_tiles=3,
            q_len=96,
            kv_len=96,
        )
        indices[0] = 7
        assert mask.indices[0] == 0
        with pytest.raises(ValueError, match="read-only"):
            mask.indices[0] = 1
        with pytest.raises(AttributeError):
            mask.q_len = 95  # type: ignore[misc]

    def test_block_lists_for_the_kernels(self) -> None:
        lists = EXAMPLE.to_block_lists()
        assert (lists.num_heads, lists.num_tiles) == (1, 3)
        assert lists.indices.tolist() == [0, 0, 1, 0, 2]
        with pytest.raises(ConfigError, match="block_size: expected 32, got 4"):
            BlockMask.full(q_len=8, kv_len=8, block_size=4).to_block_lists()


class TestTiles:
    """Tiles are blocks by absolute position; the first may be cut at its start."""

    def test_a_start_inside_a_block(self) -> None:
        mask = BlockMask.full(q_len=60, kv_len=97)  # positions 37 to 96
        assert (mask.first_tile, mask.num_tiles, mask.num_blocks) == (1, 3, 4)
        assert mask.tile_rows.tolist() == [27, 32, 1]

    def test_a_decoded_token(self) -> None:
        mask = BlockMask.full(q_len=1, kv_len=97)
        assert mask.blocks(0).tolist() == [0, 1, 2, 3]
        assert mask.tile_rows.tolist() == [1]

    @settings(max_examples=40, deadline=None)
    @given(block_masks())
    def test_rows_add_up(self, mask: BlockMask) -> None:
        assert mask.tile_rows.sum() == mask.q_len
        assert len(mask.tile_rows) == mask.num_tiles


class TestDense:
    def test_the_diagonal_block_keeps_its_triangle(self) -> None:
        """Queries 4 to 7 against keys 4 to 7: a visible block is not visible as a whole."""
        mask = BlockMask.from_lists([[[0], [0, 1]]], q_len=8, kv_len=8, block_size=4)
        np.testing.assert_array_equal(mask.to_dense()[0], np.tril(np.ones((8, 8), dtype=bool)))

    @settings(max_examples=40, deadline=None)
    @given(block_masks())
    def test_one_token_at_a_time(self, mask: BlockMask) -> None:
        dense = mask.to_dense()
        assert dense.shape == (mask.num_heads, mask.q_len, mask.kv_len)
        rng = np.random.default_rng(0)
        for _ in range(40):
            h, i, t = (int(rng.integers(n)) for n in dense.shape)
            position = mask.kv_len - mask.q_len + i
            tile = position // mask.block_size - mask.first_tile
            listed = t // mask.block_size in mask.blocks(h, tile)
            assert dense[h, i, t] == (listed and t <= position)

    @settings(max_examples=40, deadline=None)
    @given(block_masks())
    def test_no_row_is_empty(self, mask: BlockMask) -> None:
        assert mask.to_dense().any(axis=-1).all()

    @settings(max_examples=40, deadline=None)
    @given(block_masks())
    def test_there_and_back(self, mask: BlockMask) -> None:
        again = BlockMask.from_dense(
            mask.to_dense(),
            block_size=mask.block_size,
            lists_per_kv_head=mask.lists_per_kv_head,
        )
        assert again == mask
        assert hash(again) == hash(mask)

    def test_reading_by_blocks_reads_more(self) -> None:
        """Targets 1, 6, 14 of 16 by blocks of 4: 12 positions (the last query sees all 16)."""
        tokens = np.zeros((1, 16), dtype=bool)
        tokens[0, [1, 6, 14]] = True
        mask = BlockMask.from_dense(tokens, block_size=4)
        assert mask.blocks(0).tolist() == [0, 1, 3]
        assert mask.to_dense().sum() == 12

    def test_a_mask_that_reads_the_future(self) -> None:
        with pytest.raises(ConfigError, match="expected a causal mask"):
            BlockMask.from_dense(np.ones((2, 2), dtype=bool))


class TestDensity:
    def test_full_is_one(self) -> None:
        assert BlockMask.full(q_len=60, kv_len=97, num_kv_heads=3).density == 1.0

    def test_pairs_of_the_example(self) -> None:
        assert EXAMPLE.pairs_attended == 32 * (1 + 2 + 2)
        assert EXAMPLE.pairs_causal == 32 * (1 + 2 + 3)
        assert EXAMPLE.density == pytest.approx(5 / 6)

    def test_rows_weigh_a_tile(self) -> None:
        mask = BlockMask.from_lists([[[0], [1]]], q_len=33, kv_len=33)
        assert (mask.pairs_attended, mask.pairs_causal) == (32 + 1, 32 + 2)

    def test_the_union_of_a_group_is_counted_once(self) -> None:
        mask = BlockMask.from_lists(
            [[[0, 3]], [[1, 3]], [[2, 3]], [[2, 3]]], q_len=1, kv_len=128, lists_per_kv_head=2
        )
        assert mask.num_kv_heads == 2
        assert mask.pairs_attended == 3 + 2
        assert mask.density == pytest.approx(5 / 8)


class TestSets:
    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_union_and_intersection_by_tokens(self, data: st.DataObject) -> None:
        one = data.draw(block_masks(block=4))
        grid = one.to_blocks()
        other = BlockMask.from_blocks(
            np.logical_or(grid, np.arange(grid.shape[2]) == 0),
            q_len=one.q_len,
            kv_len=one.kv_len,
            block_size=4,
            lists_per_kv_head=one.lists_per_kv_head,
        )
        np.testing.assert_array_equal((one | other).to_dense(), one.to_dense() | other.to_dense())
        np.testing.assert_array_equal((one & other).to_dense(), one.to_dense() & other.to_dense())

    def test_a_union_lists_a_shared_block_once(self) -> None:
        window = BlockMask.from_lists([[[0], [0, 1], [1, 2]]], q_len=96, kv_len=96)
        assert (EXAMPLE | window).indices.tolist() == [0, 0, 1, 0, 1, 2]

    def test_a_group_list_meets_lists_per_query_head(self) -> None:
        group = BlockMask.from_lists([[[3]]], q_len=1, kv_len=128)
        heads = BlockMask.from_lists([[[0]], [[1]]], q_len=1, kv_len=128, lists_per_kv_head=2)
        both = group | heads
        assert [both.blocks(h).tolist() for h in range(2)] == [[0, 3], [1, 3]]
        assert both.num_kv_heads == 1

    def test_an_empty_intersection(self) -> None:
        one = BlockMask.from_lists([[[0]]], q_len=1, kv_len=64)
        two = BlockMask.from_lists([[[1]]], q_len=1, kv_len=64)
        with pytest.raises(ConfigError, match="at least one block in every row"):
            _ = one & two

    def test_sizes_differ(self) -> None:
        with pytest.raises(ShapeError, match="other: expected"):
            _ = EXAMPLE | BlockMask.full(q_len=96, kv_len=128)

    def test_other_types(self) -> None:
        assert EXAMPLE != "mask"
        with pytest.raises(TypeError):
            _ = EXAMPLE | 3  # type: ignore[operator]


class TestRefused:
    @pytest.mark.parametrize(
        ("indptr", "indices", "message"),
        [
            (
                [0, 1, 3, 3],
                [0, 0, 1],
                "at least one block in every row, got none in head 0, tile 2",
            ),
            ([0, 1, 3, 5], [0, 1, 0, 0, 2], "ascending, unique blocks in head 0, tile 1"),
            ([0, 1, 3, 5], [0, 1, 1, 0, 2], "ascending, unique blocks in head 0, tile 1"),
            ([0, 1, 3, 5], [0, 0, 2, 0, 2], r"blocks 0 to 1 in head 0, tile 1 \(causal\), got 2"),
            ([0, 1, 3, 5], [0, 0, 1, 0, 3], "blocks 0 to 2"),
            ([0, 1, 3, 5], [0, -1, 1, 0, 2], "got -1"),
            ([0, 1, 3, 5], [0, 0, 2**33, 0, 2], "expected values that fit int32"),
        ],
    )
    def test_rows(self, indptr: list[int], indices: list[int], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            mask_of(indptr, indices)

    @pytest.mark.parametrize(
        ("indptr", "indices", "sizes", "message"),
        [
            ([0, 1, 3], [0, 0, 1], {}, "indptr: expected 4 offsets"),
            ([1, 2, 3, 5], [0, 0, 1, 0, 2], {}, "start at 0"),
            ([0, 1, 3, 5], [0, 0, 1, 0], {}, r"expected indptr\[-1\]=5 entries, got 4"),
            ([0, 1, 3, 5], [0, 0, 1, 0, 2], {"num_tiles": 2}, "num_tiles: expected 3"),
            ([0, 1, 3, 5], [0, 0, 1, 0, 2], {"kv_len": 95}, "q_len: expected at most kv_len=95"),
        ],
    )
    def test_shapes(
        self, indptr: list[int], indices: list[int], sizes: dict[str, int], message: str
    ) -> None:
        with pytest.raises(ShapeError, match=message):
            mask_of(indptr, indices, **sizes)

    @pytest.mark.parametrize("size", [0, -1, 1.5, True])
    def test_sizes(self, size: int) -> None:
        with pytest.raises(ConfigError, match="kv_len: expected a positive integer"):
            mask_of([0, 1, 3, 5], [0, 0, 1, 0, 2], kv_len=size)

    def test_float_indices(self) -> None:
        with pytest.raises(ShapeError, match="indices: expected a one-dimensional integer array"):
            BlockMask(
                indptr=np.array([0, 1]),
                indices=np.array([0.0]),  # type: ignore[arg-type]
                num_kv_heads=1,
                num_tiles=1,
                q_len=1,
                kv_len=1,
            )

    def test_other_forms(self) -> None:
        with pytest.raises(ShapeError, match="same number of tiles"):
            BlockMask.from_lists([[[0], [0]], [[0]]], q_len=64, kv_len=64)
        with pytest.raises(ShapeError, match="a divisor of the 3 heads"):
            BlockMask.from_lists([[[0]]] * 3, q_len=1, kv_len=1, lists_per_kv_head=2)
        with pytest.raises(ShapeError, match=r"grid: expected bool \[heads, tiles, 2\]"):
            BlockMask.from_blocks(np.ones((1, 1, 3), dtype=bool), q_len=1, kv_len=64)
        with pytest.raises(ShapeError, match="1 <= Tq <= Tkv"):
            BlockMask.from_dense(np.ones((3, 2), dtype=bool))
        with pytest.raises(ConfigError, match="block_size"):
            BlockMask.from_dense(np.ones((1, 2), dtype=bool), block_size=0)
        with pytest.raises(ConfigError, match=r"\[BlockMask.blocks\]"):
            EXAMPLE.blocks(0, 3)


class TestRepr:
    def test_it_draws_small_masks(self) -> None:
        lines = repr(EXAMPLE).splitlines()
        assert lines[0].startswith("BlockMask(1 KV heads x 3 tiles, 5 blocks of 32 tokens listed")
        assert "density=0.833" in lines[0]
        assert [line.split("|")[1] for line in lines[2:]] == ["#", "##", "#.#"]

    def test_large_masks_take_one_line(self) -> None:
        assert "\n" not in repr(BlockMask.full(q_len=1, kv_len=65 * 32))
