"""The formulas of sparse attention, one function each: pairs, FLOP, bytes, and what they buy.

A *pair* is a query and a token that it reads. Counts are Python integers, exact at any length.
"""

from collections.abc import Iterable

from kvsieve.attention import masks
from kvsieve.errors import ConfigError
from kvsieve.types import BLOCK_SIZE


def causal_pairs(n_tokens: int) -> int:
    """Pairs that `n_tokens` queries read of their own tokens: ``n (n + 1) / 2``."""
    return masks.causal().pairs_read(n_tokens)


def window_pairs(n_tokens: int, *, width_tokens: int) -> int:
    """Pairs under a causal window of ``w <= n`` tokens, the own included: ``n w - w (w - 1) / 2``.

    The first ``w - 1`` rows are not full yet, so it is a little less than ``n w``. A window wider
    than the context reads `causal_pairs`.
    """
    return masks.sliding_window(width_tokens).pairs_read(n_tokens)


def reach_tokens(num_layers: int, *, width_tokens: int) -> int:
    """Positions that the last of L window layers can draw on: ``L (w - 1) + 1``, its own included.

    Drawn on through L transformations: not the same as reading the far token.
    """
    return masks.receptive_field(width_tokens, num_layers)


def loaded_tokens(
    positions: Iterable[int], *, n_tokens: int, block_tokens: int = BLOCK_SIZE
) -> int:
    """Tokens loaded to get at `positions` block by block: the sizes of the blocks they lie in."""
    return masks.positions_loaded(positions, block_size=block_tokens, kv_len=n_tokens)


def attention_flop(pairs: int, *, head_dim: int) -> int:
    """Floating-point operations of one head over `pairs`: ``4 d`` each.

    ``2 d`` for the dot product of query and key, ``2 d`` to add the weighted value.
    """
    return 4 * head_dim * pairs


def score_flop(keys: int, *, dims: int) -> int:
    """Operations to score so many keys of `dims` dimensions with one query: ``2 dims`` each."""
    return 2 * dims * keys


def vector_bytes(n_tokens: int, *, dims: int, value_bytes: int = 2) -> int:
    """Bytes of one vector per token: ``n * dims * value_bytes``.

    An index of 16 dimensions in 16 bits over 32,768 tokens takes 1 MiB, and a scan reads it all.
    Keys and values are two vectors.
    """
    return n_tokens * dims * value_bytes


def attention_speedup_ratio(
    *, attention_ms: float, select_ms: float, gather_ms: float, sparse_ms: float
) -> float:
    """Exact attention over everything its replacement does: ``full / (select+gather+sparse)``."""
    return _ratio(attention_ms, select_ms + gather_ms + sparse_ms)


def whole_speedup_ratio(
    *, attention_ms: float, select_ms: float, gather_ms: float, sparse_ms: float, other_ms: float
) -> float:
    """The same for all of a token's time: ``(full+other) / (select+gather+sparse+other)``."""
    return _ratio(attention_ms + other_ms, select_ms + gather_ms + sparse_ms + other_ms)


def other_ms(total_ms: float, *, attention_ms: float) -> float:
    """What a token costs beside attention: ``total - attention``; the same at every context."""
    return total_ms - attention_ms


def _ratio(before_ms: float, after_ms: float) -> float:
    if after_ms <= 0:
        raise ConfigError(f"[speedup] sparse: expected more than 0 ms in all, got {after_ms}")
    return before_ms / after_ms
