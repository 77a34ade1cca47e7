"""Selector ``meanstd``: the mean of a block's keys, and how far they spread."""

from dataclasses import dataclass
from typing import ClassVar

from kvsieve.attention.selectors.cached import CachedSelector
from kvsieve.kernels.backend import SelectorKind


@dataclass(frozen=True, kw_only=True)
class MeanStdSelector(CachedSelector):
    """Score a block by the logit of its mean key plus the spread of its keys, channel by channel.

    ``q . mean + |q| . deviation``. docs/selection.md, section 4.
    """

    kind: ClassVar[SelectorKind] = "meanstd"
