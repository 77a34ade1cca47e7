"""What selectors kept of a sequence at one position, so that another one may go on from there."""

from dataclasses import dataclass

from kvsieve.types import I64, U8


@dataclass(frozen=True, kw_only=True)
class SelectorSnapshot:
    """Selector data at `num_tokens` tokens, as a piece that goes on from `since` tokens.

    index       ``u8 [L, groups, Hkv, record_bytes]`` from group `first_group` on, or None
    importance  ``i64 [L, num_tokens]``, whole, because later queries add to earlier tokens
    """

    since: int
    num_tokens: int
    first_group: int
    index: U8 | None
    importance: I64 | None

    @property
    def num_bytes(self) -> int:
        """Bytes of both arrays."""
        arrays = (self.index, self.importance)
        return sum(array.nbytes for array in arrays if array is not None)
