"""Selector ``window``: the first block and the last ones, whatever the query."""

from dataclasses import dataclass

import numpy as np

from kvsieve.attention.selectors.base import Selector
from kvsieve.kernels.reference.selection import count_blocks, pick_window
from kvsieve.types import F32, I32, I64


@dataclass(frozen=True, kw_only=True)
class WindowSelector(Selector):
    """The last k blocks, block 0 in place of the oldest: a control that loses what lies between.

    docs/selection.md, section 4.
    """

    def score(self, q: F32, k: F32, *, scale: float) -> F32:
        """The block's number, so that later ones are better."""
        num_blocks = count_blocks(k.shape[1], self.block_size)
        numbers = np.arange(num_blocks, dtype=np.float32)
        return np.broadcast_to(numbers, (*q.shape[:2], num_blocks)).copy()

    def pick(self, scores: F32, importance_sums: I64 | None) -> I32:
        """Without looking at any score."""
        return pick_window(len(scores), self.k)

    def pick_tile(self, scores: F32) -> I32:
        """The same; the tile's own block is behind those that have a score."""
        return pick_window(len(scores) + 1, self.k)
