"""Selector ``probe``: the original system's rule, with its reserve and its failure at k = 1."""

from dataclasses import dataclass

from kvsieve.attention.selectors.base import Selector, strided_scores
from kvsieve.kernels.reference.selection import pick_probe
from kvsieve.types import F32, I32, I64


@dataclass(frozen=True, kw_only=True)
class ProbeSelector(Selector):
    """Half of the budget for the blocks the prompt attended to most, the rest by probed keys.

    In prefill there is no reserve and the rule is that of every selector. docs/selection.md,
    section 3.
    """

    num_probes: int = 8

    def score(self, q: F32, k: F32, *, scale: float) -> F32:
        """See `Selector.score`."""
        return strided_scores(
            q, k, scale=scale, block_size=self.block_size, num_probes=self.num_probes
        )

    def pick(self, scores: F32, importance_sums: I64 | None) -> I32:
        """Reserve, fill, recency; no other guard.

        The last block takes the place of the worst filled block, never of a reserved one: with
        ``k = 1`` and importance it is not read at all.
        """
        return pick_probe(scores, importance_sums, self.k)
