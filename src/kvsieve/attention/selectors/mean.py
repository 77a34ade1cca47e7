"""Selector ``mean``: the mean of a block's keys."""

from dataclasses import dataclass
from typing import ClassVar

from kvsieve.attention.selectors.cached import CachedSelector
from kvsieve.kernels.backend import SelectorKind


@dataclass(frozen=True, kw_only=True)
class MeanSelector(CachedSelector):
    """Score a block by the logit of its mean key. docs/selection.md, section 4."""

    kind: ClassVar[SelectorKind] = "mean"
