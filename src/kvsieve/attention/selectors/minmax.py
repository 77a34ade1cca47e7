"""Selector ``minmax``: bounds of a block's keys."""

from dataclasses import dataclass
from typing import ClassVar

from kvsieve.attention.selectors.cached import CachedSelector
from kvsieve.kernels.backend import SelectorKind


@dataclass(frozen=True, kw_only=True)
class MinMaxSelector(CachedSelector):
    """Score a block by what no logit of its keys can exceed, channel by channel (Quest).

    The sum over channels of the larger of ``q * largest`` and ``q * smallest`` key. Both bounds are
    q8 rows, rounded outward. docs/selection.md, section 4.
    """

    kind: ClassVar[SelectorKind] = "minmax"
