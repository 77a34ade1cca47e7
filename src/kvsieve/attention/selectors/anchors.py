"""Selector ``anchors``: a block's most attended keys and the mean of the others."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvsieve.attention.selectors.cached import CachedSelector
from kvsieve.kernels.backend import SelectorKind, SparsePlan


@dataclass(frozen=True, kw_only=True)
class AnchorsSelector(CachedSelector):
    """Estimate each block's share of a query's attention; read the blocks with most of it.

    The last row of the block behind chooses a block's anchors. Where that row is not among the
    queries given, two evenly spaced keys stand in: nobody has been seen to attend.

    mass   share of the attention to reach instead of always `k` blocks; 0: always `k`
    k_min  blocks to read at least under `mass`

    docs/selection.md, section 4.
    """

    kind: ClassVar[SelectorKind] = "anchors"
    mass: float = 0.0
    k_min: int = 1

    def _plan(self, exact_from: int | None) -> SparsePlan:
        return replace(super()._plan(exact_from), mass=self.mass, k_min=self.k_min)
