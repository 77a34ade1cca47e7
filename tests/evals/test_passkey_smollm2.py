"""The pass key on the real model: what the project promises of exact and sparse attention."""

import pytest

from kvsieve.engine.llm import LLM
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.passkey import run_passkey

DEPTHS = [0.1, 0.5, 0.9]


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2") as llm:
        yield llm


def rows_of(llm, arm, lengths):
    return list(run_passkey(llm, arms=parse_arms([arm]), lengths=lengths, depths=DEPTHS))


def test_short_prompts_are_found_by_exact_and_sparse_attention(llm):
    for arm in ("exact", "sparse:k=16,selector=even,share=group"):
        rows = rows_of(llm, arm, [1000])
        assert [row.hit for row in rows] == [True] * 3
    assert all(row.mode == "sparse" and row.density < 1 for row in rows)


def test_a_sparse_run_that_stays_exact_says_why(llm):
    (row, *_) = rows_of(llm, "sparse:k=32", [900])
    assert row.mode == "exact"
    assert "32" in row.exact_because


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm",
    [
        "exact",
        "sparse:k=32",
        "sparse:k=32,selector=even",
        "sparse:k=32,selector=even,share=group",
        "sparse:k=16,selector=even",
        "sparse:k=16,selector=even,share=group",
    ],
)
def test_12_of_12_up_to_6000_tokens(llm, arm):
    rows = rows_of(llm, arm, [1000, 2000, 4000, 6000])
    assert len(rows) == 12
    assert [row.answer for row in rows if not row.hit] == []
    for row in rows:
        if row.mode == "exact" and arm != "exact":
            assert row.prompt_tokens <= 1024
            assert row.exact_because
        elif arm != "exact":
            assert row.density < 1


@pytest.mark.slow
def test_the_original_rule_at_k_1_finds_none_beyond_1024_tokens(llm):
    rows = rows_of(llm, "sparse:k=1", [2000, 4000, 6000])
    assert [row.answer for row in rows if row.hit] == []
    assert all(row.mode == "sparse" for row in rows)
