"""Which blocks of a sequence another one may reuse, by hand."""

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache
from kvsieve.cache.prefix_cache import EXACT
from kvsieve.engine.origins import prompt_origins, reusable_tokens
from kvsieve.engine.sequence import Sequence
from kvsieve.kernels.layout import PageLayout


def sequence(
    sparse: SparseAttention | None, *, prompt_len: int, done: int, max_tokens: int = 512
) -> Sequence:
    layout = PageLayout(k_type="f16", v_type="f16", head_dim=16)
    pool = BlockPool(layout, num_layers=1, num_kv_heads=1, num_blocks=16)
    cache = KVCache(pool, max_tokens=max_tokens)
    cache.reserve(done)
    cache.commit(done)
    one = Sequence(prompt_ids=np.zeros(prompt_len, np.int32), cache=cache, sparse=sparse)
    one.output_ids += [0] * max(0, done + 1 - prompt_len)
    return one


def which(origins: list[bytes]) -> str:
    return "".join("e" if origin == EXACT else "s" for origin in origins)


def test_an_exact_prompt_is_exact():
    assert which(prompt_origins(None, prompt_len=100)) == "eeee"


@pytest.mark.parametrize(
    ("sparse", "prompt_len", "expected"),
    [
        # Tiles 0 and 1 pass no gate; with k = 3, tile 2 has 3 blocks, which fit the budget.
        (SparseAttention(k=3, dense_tail=0), 256, "eeesssss"),
        (SparseAttention(k=1, dense_tail=0), 256, "eessssss"),
        # 256 - 40 = 216: tiles from 6 on are exact.
        (SparseAttention(k=3, dense_tail=40), 256, "eeesssee"),
        (SparseAttention(k=3, dense_tail=0), 250, "eeesssse"),
        (SparseAttention(k=3, dense_tail=0, phase="decode"), 256, "eeeeeeee"),
        (SparseAttention(k=8, dense_tail=0), 256, "eeeeeeee"),
    ],
)
def test_tiles_of_a_sparse_prompt(sparse: SparseAttention, prompt_len: int, expected: str):
    assert which(prompt_origins(sparse, prompt_len=prompt_len)) == expected


def test_another_plan_is_another_origin_and_another_tail_is_not():
    def last(**changes: object) -> bytes:
        sparse = SparseAttention(**{"k": 2, "dense_tail": 0, **changes})  # type: ignore[arg-type]
        return prompt_origins(sparse, prompt_len=128)[2]

    others = [{"k": 1}, {"num_probes": 4}, {"selector": "even"}, {"share": "group"}]
    assert len({last(), *(last(**change) for change in others)}) == 5
    assert last(dense_tail=20) == last()


def test_an_exact_sequence_gives_everything():
    assert reusable_tokens(sequence(None, prompt_len=70, done=100)) == (100, [EXACT] * 4)
    assert reusable_tokens(sequence(None, prompt_len=70, done=70)) == (70, [EXACT] * 3)


def test_a_prompt_that_was_cut_short_gives_whole_blocks():
    assert reusable_tokens(sequence(None, prompt_len=300, done=64)) == (64, [EXACT] * 2)
    sparse = SparseAttention(k=2, dense_tail=0)
    count, origins = reusable_tokens(sequence(sparse, prompt_len=300, done=128))
    assert (count, which(origins)) == (128, "eess")


def test_what_sparse_decoding_generated_is_left_out():
    sparse = SparseAttention(k=2, dense_tail=0)
    count, origins = reusable_tokens(sequence(sparse, prompt_len=150, done=170))
    assert (count, which(origins)) == (150, "eesse")


def test_what_was_generated_before_the_gate_is_kept():
    sparse = SparseAttention(k=4, dense_tail=0)
    # 128 tokens are 4 blocks: the budget. From the 129th on, decoding is sparse.
    assert reusable_tokens(sequence(sparse, prompt_len=100, done=128))[0] == 128
    assert reusable_tokens(sequence(sparse, prompt_len=100, done=129))[0] == 100


def test_exact_decoding_after_a_sparse_prompt_is_kept():
    sparse = SparseAttention(k=2, dense_tail=0, phase="prefill")
    count, origins = reusable_tokens(sequence(sparse, prompt_len=150, done=200))
    assert (count, which(origins)) == (200, "eesseee")
