"""What a rule reads, counted one query at a time beside the formulas."""

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.attention.masks import sliding_window
from kvsieve.attention.selection import select_blocks
from kvsieve.errors import ConfigError
from kvsieve.lab.reading import (
    Rule,
    ScoreCost,
    exact_prompt,
    exact_token,
    first_sparse_tokens,
    rule_prompt,
    rule_token,
    scored_blocks,
)
from kvsieve.lab.shape import ModelShape

SHAPE = ModelShape(head_dim=32, num_q_heads=4, num_kv_heads=2, k_type="f16", v_type="f16")


def arrays(n: int, *, queries: int):
    rng = np.random.default_rng(n)
    q = rng.standard_normal((4, queries, 32), np.float32)
    return q, rng.standard_normal((2, n, 32), np.float32)


@pytest.mark.parametrize("n", [1, 31, 64, 65, 96, 129, 250, 512])
@pytest.mark.parametrize("selector", ["probe", "even"])
@pytest.mark.parametrize("block_size", [32, 64])
def test_a_token_reads_as_many_tokens_as_its_list_has(n, selector, block_size) -> None:
    sparse = SparseAttention(k=3, selector=selector, block_size=block_size, share="group")
    mask = select_blocks(*arrays(n, queries=1), sparse=sparse, prompt_len=n - 1 or None)
    per_head = mask.to_dense().sum(axis=(1, 2))
    reading = rule_token(SHAPE, Rule(sparse=sparse), n_tokens=n)
    assert per_head.tolist() == [reading.pairs] * 2
    assert reading.loaded_tokens == 2 * reading.pairs


@pytest.mark.parametrize("n", [1, 33, 64, 160, 250, 512])
@pytest.mark.parametrize("block_size", [32, 96])
@pytest.mark.parametrize("tail", [0, 128])
def test_a_prompt_reads_as_many_pairs_as_its_mask_has(n, block_size, tail) -> None:
    sparse = SparseAttention(k=2, selector="even", block_size=block_size, dense_tail=tail)
    mask = select_blocks(*arrays(n, queries=n), sparse=sparse)
    dense = mask.to_dense()
    reading = rule_prompt(SHAPE, Rule(sparse=sparse), n_tokens=n)
    assert dense.sum(axis=(1, 2)).tolist() == [reading.pairs] * 2
    # A tile loads what its last row sees, and each KV head for itself.
    ends = [min(start + 32, n) - 1 for start in range(0, n, 32)]
    assert reading.loaded_tokens == int(dense[:, ends].sum())


def test_the_mask_of_a_prompt_scores_every_earlier_block_of_sparse_tiles() -> None:
    sparse = SparseAttention(k=2, selector="even", dense_tail=0)
    reading = rule_prompt(SHAPE, Rule(sparse=sparse), n_tokens=160)
    # Tiles 2, 3, 4 are sparse and score 2, 3, 4 blocks with 32 rows; f16 keys are scored by page.
    assert reading.scored_keys == 32 * (2 + 3 + 4) * 32
    assert reading.index_bytes == 2 * (2 + 3 + 4) * 32 * 32 * 2


@pytest.mark.parametrize("n", [1, 40, 100, 161])
@pytest.mark.parametrize("width", [1, 7, 32, 50, 200])
def test_a_window_reads_what_its_mask_has(n: int, width: int) -> None:
    rule = Rule(window_tokens=width)
    tokens = sliding_window(width).tokens(n)
    assert rule_prompt(SHAPE, rule, n_tokens=n).pairs == tokens.sum()
    assert rule_token(SHAPE, rule, n_tokens=n).pairs == tokens[-1].sum()
    loads = sum(tokens[start : start + 32].any(axis=0).sum() for start in range(0, n, 32))
    assert rule_prompt(SHAPE, rule, n_tokens=n).loaded_tokens == 2 * loads


def test_window_and_blocks_are_added_but_never_beyond_everything() -> None:
    rule = Rule(sparse=SparseAttention(k=2, dense_tail=128), window_tokens=20)
    assert rule_token(SHAPE, rule, n_tokens=320).pairs == 64 + 20
    assert rule_token(SHAPE, rule, n_tokens=66).pairs == 32 + 2 + 20
    assert rule_prompt(SHAPE, Rule(sparse=rule.sparse, window_tokens=10**6), n_tokens=300) != (
        exact_prompt(SHAPE, n_tokens=300)
    )
    wide = rule_prompt(SHAPE, Rule(sparse=rule.sparse, window_tokens=10**6), n_tokens=300)
    assert wide.pairs == exact_prompt(SHAPE, n_tokens=300).pairs


def test_exact_reading() -> None:
    assert exact_token(SHAPE, n_tokens=77).pairs == 77
    assert exact_token(SHAPE, n_tokens=77).loaded_tokens == 2 * 77
    assert exact_prompt(SHAPE, n_tokens=77).pairs == 77 * 78 // 2
    assert exact_prompt(SHAPE, n_tokens=77).loaded_tokens == 2 * (32 + 64 + 77)


def test_each_list_loads_its_own_blocks_and_index() -> None:
    q8 = ModelShape(head_dim=64, num_q_heads=9, num_kv_heads=3)
    group, head = (
        rule_token(q8, Rule(sparse=SparseAttention(selector="even", share=share)), n_tokens=4096)
        for share in ("group", "head")
    )
    assert group.loaded_tokens == 3 * 1024
    assert head.loaded_tokens == 9 * 1024
    # 8 keys of 64 values and a 4-byte scale stand for a block.
    assert group.index_bytes == 3 * 128 * 8 * 68
    assert head.index_bytes == 9 * 128 * 8 * 68
    assert group.selection_bytes == 3 * (128 * 8 + 32 * 4)
    assert group.scored_keys == head.scored_keys == 128 * 8


@pytest.mark.parametrize(
    ("n", "coarse", "fine"),
    [
        (8192, 0, 256),  # 16 super-blocks are all candidates
        (8193 + 31, 257, 15 * 16 + 1),  # the 17th holds one full block
        (32768, 1024, 256),
        (32768 + 5, 1024, 257),  # and the open one
    ],
)
def test_two_levels_of_even(n: int, coarse: int, fine: int) -> None:
    q8 = ModelShape(head_dim=64, num_q_heads=3)
    sparse = SparseAttention(selector="even", share="group")
    reading = rule_token(q8, Rule(sparse=sparse), n_tokens=n)
    assert scored_blocks(Rule(sparse=sparse), n_tokens=n) == (coarse, fine)
    assert reading.scored_keys == 2 * coarse + 8 * fine
    assert reading.index_bytes == 68 * (2 * coarse + 8 * fine)
    one_level = SparseAttention(selector="probe", share="group")
    assert scored_blocks(Rule(sparse=one_level), n_tokens=n) == (0, -(-n // 32))
    assert scored_blocks(Rule(sparse=SparseAttention(k=512, selector="even")), n_tokens=n)[0] == 0


def test_probe_reads_importance_and_with_one_place_loses_the_last_block() -> None:
    even, probe = (
        rule_token(SHAPE, Rule(sparse=SparseAttention(k=1, selector=name)), n_tokens=330)
        for name in ("even", "probe")
    )
    assert even.pairs == 330 - 10 * 32
    assert probe.pairs == 32
    assert probe.selection_bytes - even.selection_bytes == 8 * 330


@pytest.mark.parametrize(
    ("selector", "block_size", "keys", "load_bytes"),
    [
        ("minmax", 32, 2, 2 * (64 + 4)),
        ("meanstd", 64, 4, 4 * (64 + 4)),
        ("mean", 32, 1, 64 + 4),
        ("anchors", 32, 3, 3 * (64 + 4) + 16),
        ("oracle", 64, 64, 64 * (64 + 4)),
        ("random", 32, 0, 0),
        ("window", 32, 0, 0),
    ],
)
def test_what_the_score_of_a_block_takes(
    selector: str, block_size: int, keys: int, load_bytes: int
) -> None:
    """Vectors of a record and their scales; every key of the cache; nothing."""
    sparse = SparseAttention(selector=selector, block_size=block_size)  # type: ignore[arg-type]
    shape = ModelShape(head_dim=64)
    cost = ScoreCost.of(Rule(sparse=sparse), shape)
    assert (cost.keys, cost.load_bytes) == (keys, load_bytes)


def test_a_scan_reads_the_small_vector_of_every_token() -> None:
    one_head = ModelShape(head_dim=128, k_type="bf16", v_type="bf16")
    rule = Rule(sparse=SparseAttention(selector="even"), scan_dims=16)
    assert rule_token(one_head, rule, n_tokens=32768).index_bytes == 2**20
    assert ScoreCost.of(rule, one_head).dims == 16


def test_keys_without_an_index_are_scored_by_page() -> None:
    strided = SparseAttention(selector="even", block_size=128, num_probes=2)
    assert ScoreCost.of(Rule(sparse=strided), SHAPE).keys == 2 * 32
    assert ScoreCost.of(Rule(sparse=strided), SHAPE).load_bytes == 2 * 32 * 32 * 2


@pytest.mark.parametrize(("k", "block_size", "first"), [(32, 32, 1025), (1, 32, 65), (2, 64, 129)])
def test_the_first_context_beyond_the_budget(k: int, block_size: int, first: int) -> None:
    sparse = SparseAttention(k=k, block_size=block_size)
    assert first_sparse_tokens(sparse) == first
    before, after = (
        rule_token(SHAPE, Rule(sparse=sparse), n_tokens=n).scored_keys for n in (first - 1, first)
    )
    assert before == 0 < after


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "chosen blocks or a window, got neither"),
        ({"window_tokens": 0}, "window_tokens: expected 1 or more, got 0"),
        ({"sparse": SparseAttention(), "scan_dims": 0}, "scan_dims: expected 1 or more"),
        ({"window_tokens": 5, "scan_dims": 16}, "scan_dims: expected chosen blocks beside it"),
    ],
)
def test_rules_that_say_nothing(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rule(**fields)
