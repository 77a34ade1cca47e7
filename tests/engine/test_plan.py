from typing import Any

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.plan import can_be_sparse, sparse_plan, why_exact


def test_no_sparse_attention_is_no_plan():
    assert sparse_plan(None, prompt_len=4000, is_prefill=True) is None
    assert sparse_plan(None, prompt_len=4000, is_prefill=False) is None


@pytest.mark.parametrize(
    ("phase", "in_prefill", "in_decode"),
    [("both", True, True), ("prefill", True, False), ("decode", False, True)],
)
def test_a_phase_that_is_left_out_has_no_plan(phase: Any, in_prefill: bool, in_decode: bool):
    sparse = SparseAttention(phase=phase)
    assert (sparse_plan(sparse, prompt_len=4000, is_prefill=True) is not None) == in_prefill
    assert (sparse_plan(sparse, prompt_len=4000, is_prefill=False) is not None) == in_decode


def test_a_plan_carries_the_request():
    sparse = SparseAttention(k=7, block_size=64, num_probes=4, selector="even", share="group")
    plan = sparse_plan(sparse, prompt_len=1000, is_prefill=True)
    assert plan is not None
    assert (plan.k, plan.block_size, plan.num_probes) == (7, 64, 4)
    assert (plan.selector, plan.share) == ("even", "group")


@pytest.mark.parametrize(
    ("prompt_len", "tail", "tile"),
    [(1000, 128, 27), (1024, 128, 28), (1023, 128, 27), (100, 128, 0), (128, 128, 0), (64, 0, 2)],
)
def test_the_exact_tail_starts_at_a_whole_tile(prompt_len: int, tail: int, tile: int):
    plan = sparse_plan(SparseAttention(dense_tail=tail), prompt_len=prompt_len, is_prefill=True)
    assert plan is not None
    assert plan.exact_from_tile == tile


# Blocks of 32: 8 fit 256 tokens; blocks of 64: 8 fit 512.
@pytest.mark.parametrize(
    ("k", "block_size", "max_tokens", "expected"),
    [(8, 32, 256, False), (8, 32, 257, True), (8, 64, 512, False), (8, 64, 513, True)],
)
def test_can_be_sparse(k: int, block_size: int, max_tokens: int, expected: bool):
    sparse = SparseAttention(k=k, block_size=block_size)
    assert can_be_sparse(sparse, max_tokens=max_tokens) is expected


def test_up_to_64_tokens_never_sparse():
    assert not can_be_sparse(SparseAttention(k=1), max_tokens=64)
    assert can_be_sparse(SparseAttention(k=1), max_tokens=65)
    assert not can_be_sparse(None, max_tokens=10**6)


def because(prompt_len: int, num_tokens: int, **config: Any) -> str | None:
    return why_exact(SparseAttention(**config), prompt_len=prompt_len, num_tokens=num_tokens)


def test_everything_fits_the_budget():
    assert because(940, 960) == "all 30 blocks fit the budget of 32"
    assert because(20, 25) == "the only block fits the budget of 32"
    assert because(1000, 1024) == "all 32 blocks fit the budget of 32"
    assert because(1000, 1025) is None  # the 33rd block: the last decode step was sparse


def test_short_sequences_are_read_exactly_whatever_the_budget():
    assert because(60, 64, k=1) == "up to 64 tokens are always read exactly"
    assert because(60, 65, k=1) is None


def test_prefill_that_was_sparse():
    assert because(2000, 2000, phase="prefill") is None
    # Tile 32 is the first beyond 32 blocks. With 1312 tokens the tail starts at tile 33.
    assert because(1312, 1312, phase="prefill") is None
    assert because(1311, 1311, phase="prefill") == (
        "the prompt of 1311 tokens outgrows the budget only in its exact tail of 256 tokens"
    )


def test_a_phase_that_never_came():
    assert because(2000, 2000, phase="decode") == (
        "the prompt is read exactly in phase decode, and no token was decoded after it"
    )
    assert because(2000, 2001, phase="decode") is None
    assert because(1000, 1100, phase="prefill") == (
        "all 32 blocks fit the budget of 32 in the prompt, "
        "and generated tokens are read exactly in phase prefill"
    )


def test_a_prompt_cancelled_before_it_outgrew_the_budget():
    assert because(4000, 512) == "all 16 blocks fit the budget of 32"
    assert because(4000, 2048) is None
