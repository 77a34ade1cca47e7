"""Selector ``even``: evenly spaced keys, guards, no importance."""

from dataclasses import dataclass

from kvsieve.attention.selectors.base import Selector, strided_scores
from kvsieve.kernels.reference.two_levels import coarse_scores
from kvsieve.types import F32


@dataclass(frozen=True, kw_only=True)
class EvenSelector(Selector):
    """Score a block by the largest logit of `num_probes` evenly spaced keys; keep the guards.

    docs/selection.md, section 4.
    """

    num_probes: int = 8

    def score(self, q: F32, k: F32, *, scale: float) -> F32:
        """See `Selector.score`."""
        return strided_scores(
            q, k, scale=scale, block_size=self.block_size, num_probes=self.num_probes
        )

    def coarse(self, q: F32, k: F32, *, scale: float) -> F32:
        """See `Selector.coarse`."""
        return coarse_scores(
            q[:, 0], k, scale=scale, block_size=self.block_size, num_probes=self.num_probes
        )
