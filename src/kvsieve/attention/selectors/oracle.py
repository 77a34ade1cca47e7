"""Selector ``oracle``: the true attention of every block, for evaluation only."""

from dataclasses import dataclass
from typing import ClassVar

from kvsieve.attention.selectors.anchors import AnchorsSelector
from kvsieve.kernels.backend import SelectorKind


@dataclass(frozen=True, kw_only=True)
class OracleSelector(AnchorsSelector):
    """What `anchors` estimates, computed: it reads all keys to choose, and saves nothing.

    docs/selection.md, section 4.
    """

    kind: ClassVar[SelectorKind] = "oracle"
