"""Selector ``random``: blocks drawn by a hash, for evaluation only."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvsieve.attention.selectors.cached import CachedSelector
from kvsieve.kernels.backend import SelectorKind, SparsePlan


@dataclass(frozen=True, kw_only=True)
class RandomSelector(CachedSelector):
    """Draw the blocks beside the guards: what this finds, any rule would have found.

    The draw follows from seed, layer (0 here), head, position and block alone; `select_blocks`
    gives what the first layer reads. docs/selection.md, section 4.
    """

    kind: ClassVar[SelectorKind] = "random"
    seed: int = 0

    def _plan(self, exact_from: int | None) -> SparsePlan:
        return replace(super()._plan(exact_from), seed=self.seed)
