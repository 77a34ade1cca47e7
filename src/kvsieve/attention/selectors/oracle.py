"""Selector ``oracle``: the true attention of every block, for evaluation only."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvsieve.attention.selectors.cached import CachedSelector
from kvsieve.kernels.backend import SelectorKind, SparsePlan


@dataclass(frozen=True, kw_only=True)
class OracleSelector(CachedSelector):
    """What `anchors` estimates, computed: it reads all keys to choose, and saves nothing.

    mass   share of the attention to reach instead of always `k` blocks; 0: always `k`
    k_min  blocks to read at least under `mass`

    docs/selection.md, section 4.
    """

    kind: ClassVar[SelectorKind] = "oracle"
    mass: float = 0.0
    k_min: int = 1

    def _plan(self, exact_from: int | None) -> SparsePlan:
        return replace(super()._plan(exact_from), mass=self.mass, k_min=self.k_min)
