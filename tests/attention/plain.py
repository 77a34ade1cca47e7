"""Small arrays with known scores, and the lists chosen on them."""

from typing import Any

import numpy as np

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.config import SparseAttention
from kvsieve.attention.selection import select_blocks
from tests.attention.naive import Lists


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
    """Blocks of one query head whose query is 1; by the original's rule unless told otherwise."""
    options = {"selector": "probe", **options}
    q = np.ones((1, 1, 1), dtype=np.float32)
    mask = select_blocks(
        q, keys, sparse=SparseAttention(**options), importance=importance, scale=1.0
    )
    return mask.blocks(0).tolist()


def lists_of(mask: BlockMask) -> Lists:
    return [
        [mask.blocks(head, tile).tolist() for tile in range(mask.num_tiles)]
        for head in range(mask.num_heads)
    ]
