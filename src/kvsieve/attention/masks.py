"""Static masks: causal, sliding window, sinks, global tokens, and their unions.

Each is one `StaticMask`, an exact rule on tokens that can also be read by blocks. A rule says
which earlier tokens a query reads; causality and the query's own position are part of it, so
that no row is ever empty. Source: docs/selection.md, section 7.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.inputs import check_positive
from kvsieve.errors import ConfigError
from kvsieve.types import BLOCK_SIZE, Bool


@dataclass(frozen=True, kw_only=True)
class StaticMask:
    """Query ``i`` reads the last `window` tokens up to itself, and the `kept` tokens before it.

    window  tokens read up to the query's own position, itself included; None: all of them
    kept    positions that every later query reads, wherever its window is
    """

    window: int | None = None
    kept: frozenset[int] = frozenset()

    def __or__(self, other: "StaticMask") -> "StaticMask":
        """The tokens that either mask reads, each counted and weighted once."""
        if not isinstance(other, StaticMask):
            return NotImplemented
        if self.window is None or other.window is None:
            return StaticMask()
        return StaticMask(window=max(self.window, other.window), kept=self.kept | other.kept)

    def tokens(self, q_len: int, kv_len: int | None = None) -> Bool:
        """The rule itself, ``bool [Tq, Tkv]``; queries end at `kv_len` (default `q_len`)."""
        kv_len = _checked_lengths(q_len, kv_len)
        query = np.arange(kv_len - q_len, kv_len)[:, None]
        token = np.arange(kv_len)[None, :]
        recent = token > query - (kv_len if self.window is None else self.window)
        return np.asarray((token <= query) & (recent | np.isin(token, sorted(self.kept))))

    def blocks(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        num_kv_heads: int = 1,
        block_size: int = BLOCK_SIZE,
    ) -> BlockMask:
        """Every block that holds a token of the rule for some query of the tile.

        Reading by blocks reads the visible part of whole blocks: at least the rule's tokens,
        and usually more. Never builds a token mask.
        """
        check_positive("StaticMask.blocks", "block_size", block_size)
        kv_len = _checked_lengths(q_len, kv_len)
        num_blocks = -(-kv_len // block_size)
        tiles = np.arange((kv_len - q_len) // block_size, num_blocks)[:, None]
        block = np.arange(num_blocks)[None, :]
        first_query = np.maximum(tiles * block_size, kv_len - q_len)
        window = kv_len if self.window is None else self.window
        holds_kept = np.isin(block, [position // block_size for position in self.kept])
        # A tile's earliest query looks back furthest. A kept token in the tile's own block is
        # seen or not by its rows, but the diagonal block is read anyway.
        recent = block >= (first_query - window + 1).clip(min=0) // block_size
        grid = (block <= tiles) & (recent | holds_kept)
        return BlockMask.from_blocks(
            np.repeat(grid[None], num_kv_heads, axis=0),
            q_len=q_len,
            kv_len=kv_len,
            block_size=block_size,
        )

    def pairs_read(self, n: int) -> int:
        """(query, token) pairs read by `n` queries over their own `n` tokens.

        A window of width ``w <= n`` reads ``n * w - w * (w - 1) / 2``; a kept position ``p``
        adds one for each query that has left it behind, ``max(0, n - w - p)``.
        """
        _checked_lengths(n, n)
        width = n if self.window is None else min(self.window, n)
        windows = n * width - width * (width - 1) // 2
        return windows + sum(max(0, n - width - position) for position in self.kept)


def causal() -> StaticMask:
    """Query ``i`` reads tokens ``0..i``."""
    return StaticMask()


def sliding_window(width: int) -> StaticMask:
    """Query ``i`` reads tokens ``max(0, i - width + 1)..i``, itself included."""
    check_positive("sliding_window", "width", width)
    return StaticMask(window=width)


def global_tokens(positions: Iterable[int]) -> StaticMask:
    """Query ``i`` reads the tokens of `positions` that are not after it, and itself."""
    kept = frozenset(positions)
    for position in kept:
        if (
            isinstance(position, bool)
            or not isinstance(position, (int, np.integer))
            or position < 0
        ):
            raise ConfigError(
                f"[global_tokens] positions: expected integers from 0, got {position!r}"
            )
    return StaticMask(window=1, kept=kept)


def sinks(count: int) -> StaticMask:
    """Query ``i`` reads the first `count` tokens, and itself."""
    check_positive("sinks", "count", count)
    return StaticMask(window=1, kept=frozenset(range(count)))


def receptive_field(window: int, num_layers: int) -> int:
    """Positions that the last of `num_layers` equal window layers can draw on, its own included.

    ``L * (w - 1) + 1``: each layer reaches ``w - 1`` positions further back.
    """
    check_positive("receptive_field", "window", window)
    check_positive("receptive_field", "num_layers", num_layers)
    return num_layers * (window - 1) + 1


def positions_loaded(positions: Iterable[int], *, block_size: int = BLOCK_SIZE, kv_len: int) -> int:
    """Tokens that are read from memory to get at `positions`, block by block."""
    check_positive("positions_loaded", "block_size", block_size)
    wanted = set(positions)
    if not all(0 <= position < kv_len for position in wanted):
        raise ConfigError(
            f"[positions_loaded] positions: expected 0 to {kv_len - 1}, got {sorted(wanted)}"
        )
    starts = {position // block_size * block_size for position in wanted}
    return sum(min(block_size, kv_len - start) for start in starts)


def _checked_lengths(q_len: int, kv_len: int | None) -> int:
    total = q_len if kv_len is None else kv_len
    if not 1 <= q_len <= total:
        raise ConfigError(f"[StaticMask] q_len: expected 1 to kv_len={total} queries, got {q_len}")
    return total
