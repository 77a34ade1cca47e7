"""Selectors of the kernels on plain arrays: what `select_blocks` and the engine share."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.attention.config import SelectorName, SparseAttention
from kvsieve.attention.selection import select_blocks, selector_for
from kvsieve.engine.plan import selector_index, sparse_plan
from kvsieve.kernels.backends import make_backend
from tests.attention.caches import filled_segment, token_rows

NEW: list[SelectorName] = ["minmax", "mean", "meanstd", "oracle", "random"]


def arrays(num_queries: int, num_tokens: int = 700) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    q = random.standard_normal((4, num_queries, 32)).astype(np.float32)
    k = random.standard_normal((2, num_tokens, 32)).astype(np.float32)
    return q, k


@pytest.mark.parametrize("selector", NEW)
@pytest.mark.parametrize("share", ["head", "group"])
def test_a_decoded_token_reads_its_budget_guards_among_it(
    selector: SelectorName, share: str
) -> None:
    sparse = SparseAttention(selector=selector, k=6, share=share)  # type: ignore[arg-type]
    mask = select_blocks(*arrays(1), sparse=sparse)
    for head in range(mask.num_heads):
        blocks = mask.blocks(head).tolist()
        assert len(blocks) == 6
        assert {0, 20, 21} <= set(blocks)


@pytest.mark.parametrize("selector", NEW)
@pytest.mark.parametrize("num_queries", [1, 188])
def test_any_head_size_is_filled_up_with_zeros(selector: SelectorName, num_queries: int) -> None:
    q, k = arrays(num_queries)
    sparse = SparseAttention(selector=selector, k=4, dense_tail=0)
    whole = select_blocks(q[..., :24], k[..., :24], sparse=sparse, scale=0.2)
    q[..., 24:], k[..., 24:] = 0, 0
    padded = select_blocks(q, k, sparse=sparse, scale=0.2)
    np.testing.assert_array_equal(whole.indices, padded.indices)


@pytest.mark.parametrize("selector", ["minmax", "mean", "meanstd"])
def test_scores_of_several_rows_are_those_of_each(selector: SelectorName) -> None:
    q, k = arrays(3)
    rule = selector_for(SparseAttention(selector=selector))
    scores = rule.score(q, k, scale=0.2)
    assert scores.shape == (4, 3, 22)
    alone = rule.score(q[:, 1:2], k[:, :-1], scale=0.2)
    np.testing.assert_array_equal(scores[:, 1:2], alone)


@pytest.mark.parametrize("selector", ["minmax", "mean", "meanstd"])
def test_the_engine_chooses_alike(selector: SelectorName) -> None:
    q, k = arrays(1, 703)
    sparse = SparseAttention(selector=selector, k=5)
    mask = select_blocks(q, k, sparse=sparse, scale=0.25)
    backend = make_backend("reference")
    segment = filled_segment(backend, k, k, q_len=1)
    layout = selector_index(sparse, segment.layout)
    assert layout is not None
    shape = (1, layout.num_groups(703), 2, layout.record_bytes)
    index = np.zeros(shape, np.uint8)
    plan = sparse_plan(sparse, prompt_len=0, is_prefill=False)
    whole = replace(segment, start=0, q_len=703, is_prefill=True, index=index, index_layout=layout)
    backend.select(
        replace(whole, sparse=replace(plan, exact_from_tile=0)),
        0,
        np.repeat(token_rows(q), 703, axis=0),
        scale=0.25,
    )
    lists = backend.select(
        replace(segment, sparse=plan, index=index, index_layout=layout),
        0,
        token_rows(q),
        scale=0.25,
    )
    assert lists is not None
    np.testing.assert_array_equal(lists.indices, mask.indices)
