"""Static masks: the worked values of docs/selection.md, section 7, and exhaustive small sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.masks import (
    StaticMask,
    causal,
    global_tokens,
    positions_loaded,
    receptive_field,
    sinks,
    sliding_window,
)
from kvsieve.errors import ConfigError

masks = st.one_of(
    st.just(causal()),
    st.builds(sliding_window, st.integers(1, 40)),
    st.builds(sinks, st.integers(1, 40)),
    st.builds(global_tokens, st.sets(st.integers(0, 40), max_size=4)),
)
unions = st.lists(masks, min_size=1, max_size=3)


def union(parts: list[StaticMask]) -> StaticMask:
    total = parts[0]
    for part in parts[1:]:
        total = total | part
    return total


def row(mask: StaticMask, query: int) -> list[int]:
    return np.flatnonzero(mask.tokens(1, query + 1)[0]).tolist()


class TestTokenRules:
    def test_causal(self) -> None:
        assert row(causal(), 4) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("query", "expected"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (7, [5, 6, 7])]
    )
    def test_a_window_includes_its_own_position(self, query: int, expected: list[int]) -> None:
        assert row(sliding_window(3), query) == expected

    def test_sinks_and_globals_keep_the_own_position_too(self) -> None:
        assert row(sinks(2), 5) == [0, 1, 5]
        assert row(sinks(2), 0) == [0]
        assert row(global_tokens({3, 6}), 5) == [3, 5]
        assert row(global_tokens({3, 6}), 7) == [3, 6, 7]
        assert row(global_tokens({9}), 5) == [5]

    def test_union_of_overlapping_parts(self) -> None:
        mask = sliding_window(3) | sinks(1) | global_tokens({4, 6})
        assert row(mask, 7) == [0, 4, 5, 6, 7]

    @settings(max_examples=40, deadline=None)
    @given(unions, st.integers(1, 45), st.integers(0, 45))
    def test_union_is_the_or_of_its_parts_and_no_row_is_empty(
        self, parts: list[StaticMask], q_len: int, cached: int
    ) -> None:
        kv_len = q_len + cached
        tokens = union(parts).tokens(q_len, kv_len)
        either = np.logical_or.reduce([part.tokens(q_len, kv_len) for part in parts])
        np.testing.assert_array_equal(tokens, either)
        own = np.arange(cached, kv_len)
        assert tokens[np.arange(q_len), own].all()
        assert not (tokens & (np.arange(kv_len) > own[:, None])).any()


class TestPairsRead:
    @pytest.mark.parametrize(
        ("mask", "n", "expected"),
        [
            (sliding_window(256), 4096, 1_015_936),
            (causal(), 4096, 8_390_656),
            (sliding_window(3), 8, 21),
            (sliding_window(8), 8, 36),
            (sliding_window(9), 8, 36),
        ],
    )
    def test_worked_values(self, mask: StaticMask, n: int, expected: int) -> None:
        assert mask.pairs_read(n) == expected

    def test_how_many_times_fewer(self) -> None:
        assert causal().pairs_read(4096) / sliding_window(256).pairs_read(4096) == pytest.approx(
            8.26, abs=0.005
        )

    @settings(max_examples=40, deadline=None)
    @given(unions, st.integers(1, 60))
    def test_counts_each_pair_of_the_rule_once(self, parts: list[StaticMask], n: int) -> None:
        mask = union(parts)
        assert mask.pairs_read(n) == mask.tokens(n).sum()


class TestBlocks:
    @settings(max_examples=40, deadline=None)
    @given(unions, st.integers(1, 70), st.integers(0, 70), st.sampled_from([1, 4, 32]))
    def test_exactly_the_blocks_that_hold_a_token(
        self, parts: list[StaticMask], q_len: int, cached: int, block: int
    ) -> None:
        mask = union(parts)
        kv_len = q_len + cached
        read = mask.blocks(q_len, kv_len, block_size=block)
        tokens = mask.tokens(q_len, kv_len)
        for tile in range(read.num_tiles):
            rows = [i for i in range(q_len) if (cached + i) // block == read.first_tile + tile]
            touched = {int(t) // block for t in np.flatnonzero(tokens[rows].any(axis=0))}
            assert read.blocks(0, tile).tolist() == sorted(touched)

    def test_a_tile_cut_at_its_start_looks_back_from_its_first_query(self) -> None:
        """Position 7 reads 4 to 7, block 1 alone; position 4, no query here, would need block 0."""
        assert sliding_window(4).blocks(1, 8, block_size=4).blocks(0).tolist() == [1]

    def test_sinks_with_a_window_over_a_prompt(self) -> None:
        read = (sinks(4) | sliding_window(33)).blocks(160, num_kv_heads=2)
        assert read == BlockMask.from_lists(
            [[[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4]]] * 2, q_len=160, kv_len=160
        )

    def test_reads_at_least_the_rule(self) -> None:
        mask = sliding_window(5) | global_tokens({7})
        tokens = mask.tokens(50)
        assert not (tokens & ~mask.blocks(50, block_size=4).to_dense()[0]).any()


class TestReach:
    def test_worked_value(self) -> None:
        assert receptive_field(3, 4) == 9

    @pytest.mark.parametrize(("window", "layers"), [(3, 4), (1, 6), (5, 1), (2, 7)])
    def test_composing_the_layers(self, window: int, layers: int) -> None:
        """What position 30 depends on, found by following the mask through the layers."""
        step = sliding_window(window).tokens(31).astype(np.int64)
        reached = np.flatnonzero(np.linalg.matrix_power(step, layers)[30])
        assert len(reached) == receptive_field(window, layers)

    def test_position_10_sees_back_to_2(self) -> None:
        step = sliding_window(3).tokens(11).astype(np.int64)
        assert np.flatnonzero(np.linalg.matrix_power(step, 4)[10])[0] == 2


class TestPositionsLoaded:
    def test_three_targets_load_twelve_positions(self) -> None:
        assert positions_loaded({1, 6, 14}, block_size=4, kv_len=16) == 12

    def test_a_shared_block_is_loaded_once_and_the_last_one_is_short(self) -> None:
        assert positions_loaded([0, 1, 2], block_size=4, kv_len=16) == 4
        assert positions_loaded([1, 16], block_size=4, kv_len=17) == 5

    def test_a_position_beyond_the_end(self) -> None:
        with pytest.raises(ConfigError, match="expected 0 to 15"):
            positions_loaded([16], block_size=4, kv_len=16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sliding_window(0),
        lambda: sliding_window(True),
        lambda: sinks(0),
        lambda: sinks(1.5),  # type: ignore[arg-type]
        lambda: global_tokens({-1}),
        lambda: global_tokens({2.0}),  # type: ignore[arg-type]
        lambda: causal().tokens(5, 4),
        lambda: causal().tokens(0),
        lambda: causal().pairs_read(0),
        lambda: causal().blocks(8, block_size=0),
        lambda: receptive_field(0, 4),
        lambda: receptive_field(3, 0),
    ],
)
def test_values_out_of_range(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="expected"):
        make()
