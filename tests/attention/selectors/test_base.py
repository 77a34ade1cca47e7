"""A selector of one's own needs one method; everything else comes from the base."""

from dataclasses import dataclass

import numpy as np
import pytest

from kvsieve.attention.selectors.base import Selector, strided_scores
from kvsieve.types import F32


@dataclass(frozen=True, kw_only=True)
class Favourites(Selector):
    """Wants the given blocks, the first one most; a mean-key or window rule would look alike."""

    wanted: tuple[int, ...] = ()

    def score(self, q: F32, k: F32, *, scale: float) -> F32:
        num_blocks = -(-k.shape[1] // self.block_size)
        scores = np.zeros((q.shape[0], q.shape[1], num_blocks), dtype=np.float32)
        for rank, block in enumerate(self.wanted):
            if block < num_blocks:
                scores[..., block] = 10 - rank
        return scores


def arrays(q_len: int, kv_len: int) -> tuple[F32, F32]:
    return np.zeros((4, q_len, 8), dtype=np.float32), np.zeros((2, kv_len, 8), dtype=np.float32)


@pytest.mark.parametrize(("share", "lists"), [("head", 4), ("group", 2)])
def test_decode_keeps_the_guards_and_the_budget(share: str, lists: int) -> None:
    selector = Favourites(k=5, share=share, wanted=(6, 4, 2))  # type: ignore[arg-type]
    mask = selector.select_decode(*arrays(1, 300), scale=1.0)
    assert [mask.blocks(h).tolist() for h in range(mask.num_heads)] == [[0, 4, 6, 8, 9]] * lists


def test_prefill_keeps_the_guards_and_the_budget() -> None:
    selector = Favourites(k=4, wanted=(9, 6, 4, 2))
    mask = selector.select_prefill(*arrays(320, 320), scale=1.0, exact_from_tile=9)
    lists = [mask.blocks(1, tile).tolist() for tile in range(10)]
    assert lists[:4] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert lists[4:9] == [[0, 2, 3, 4], [0, 2, 4, 5], [0, 4, 5, 6], [0, 4, 6, 7], [0, 6, 7, 8]]
    assert lists[9] == list(range(10))


def test_no_exact_tail_unless_asked() -> None:
    mask = Favourites(k=1).select_prefill(*arrays(300, 300), scale=1.0)
    assert mask.blocks(0, 9).tolist() == [9]


def test_strided_scores_by_head_and_row() -> None:
    """Hand values: query head h reads KV head h // 2, the scale multiplies the logit."""
    q = np.array([[[1.0], [2.0]], [[3.0], [4.0]]], dtype=np.float32)
    q = np.concatenate([q, -q])  # 4 heads, 2 rows
    k = np.zeros((2, 40, 1), dtype=np.float32)
    k[0, 4], k[0, 33], k[0, 5] = 5.0, 7.0, 99.0  # position 5 is not sampled
    k[1, 8] = -2.0
    scores = strided_scores(q, k, scale=0.5, block_size=32, num_probes=8)
    assert scores.tolist() == [
        [[2.5, 3.5], [5.0, 7.0]],
        [[7.5, 10.5], [10.0, 14.0]],
        [[1.0, 0.0], [2.0, 0.0]],
        [[3.0, 0.0], [4.0, 0.0]],
    ]
