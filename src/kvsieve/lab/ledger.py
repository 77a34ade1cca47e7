"""The ledger: what exact attention and a rule cost, side by side, and from which context on."""

from collections.abc import Callable
from dataclasses import dataclass

from kvsieve.errors import ConfigError
from kvsieve.lab.arithmetic import attention_flop, score_flop
from kvsieve.lab.reading import (
    Reading,
    Rule,
    ScoreCost,
    exact_prompt,
    exact_token,
    rule_prompt,
    rule_token,
)
from kvsieve.lab.shape import ModelShape
from kvsieve.types import BLOCK_SIZE

LONGEST_TOKENS = 1 << 20
"""Break-even contexts are looked for up to here."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a token or a prompt costs; everything but `pairs` over all heads and layers.

    pairs            (query, token) pairs per query head and layer
    attention_flop   ``4 d Hq L pairs``
    selection_flop   ``2 dims Hq L keys scored``
    cache_bytes      ``tokens loaded (all KV heads) * bytes of a token in one KV head * L``
    index_bytes      keys that the selector loads, of the index or of the cache
    selection_bytes  scores and lists written and read back, importance
    """

    pairs: int
    attention_flop: int
    selection_flop: int
    cache_bytes: int
    index_bytes: int
    selection_bytes: int

    @property
    def total_flop(self) -> int:
        """Attention and selection."""
        return self.attention_flop + self.selection_flop

    @property
    def total_bytes(self) -> int:
        """Cache, index and selection."""
        return self.cache_bytes + self.index_bytes + self.selection_bytes


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Costs of one decoded token at a context, and of reading a prompt of that length."""

    shape: ModelShape
    rule: Rule
    n_tokens: int
    exact_token: Costs
    rule_token: Costs
    exact_prompt: Costs
    rule_prompt: Costs


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """Smallest context from which on the rule costs less than exact attention.

    None: not at `LONGEST_TOKENS` either (an eighth of that for prompts).
    """

    token_bytes_at_tokens: int | None
    token_flop_at_tokens: int | None
    prompt_flop_at_tokens: int | None


def ledger(shape: ModelShape, rule: Rule, *, n_tokens: int) -> Ledger:
    """Count everything at a context of `n_tokens`.

    Raises
    ------
    ConfigError
        `n_tokens` is not between 1 and `LONGEST_TOKENS`.
    """
    if not 1 <= n_tokens <= LONGEST_TOKENS:
        raise ConfigError(
            f"[ledger] context: expected 1 to {LONGEST_TOKENS:,} tokens, got {n_tokens:,}"
        )
    return Ledger(
        shape=shape,
        rule=rule,
        n_tokens=n_tokens,
        exact_token=_costs(exact_token(shape, n_tokens=n_tokens), shape),
        rule_token=rule_token_costs(shape, rule, n_tokens=n_tokens),
        exact_prompt=_costs(exact_prompt(shape, n_tokens=n_tokens), shape),
        rule_prompt=_costs(
            rule_prompt(shape, rule, n_tokens=n_tokens), shape, ScoreCost.of(rule, shape)
        ),
    )


def rule_token_costs(shape: ModelShape, rule: Rule, *, n_tokens: int) -> Costs:
    """Costs of one decoded token under a rule."""
    reading = rule_token(shape, rule, n_tokens=n_tokens)
    return _costs(reading, shape, ScoreCost.of(rule, shape))


def exact_token_costs(shape: ModelShape, *, n_tokens: int) -> Costs:
    """Costs of one decoded token that reads everything."""
    return _costs(exact_token(shape, n_tokens=n_tokens), shape)


def break_even(shape: ModelShape, rule: Rule) -> BreakEven:
    """Where the rule begins to cost less, by bytes and by FLOP."""

    def token(quantity: Callable[[Costs], int]) -> int | None:
        def saved(n: int) -> bool:
            exact = exact_token_costs(shape, n_tokens=n)
            return quantity(rule_token_costs(shape, rule, n_tokens=n)) < quantity(exact)

        return first_context(saved)

    def prompt_saved(n: int) -> bool:
        exact = _costs(exact_prompt(shape, n_tokens=n), shape)
        sparse = _costs(rule_prompt(shape, rule, n_tokens=n), shape, ScoreCost.of(rule, shape))
        return sparse.total_flop < exact.total_flop

    return BreakEven(
        token_bytes_at_tokens=token(lambda costs: costs.total_bytes),
        token_flop_at_tokens=token(lambda costs: costs.total_flop),
        # Each look counts every tile of a prompt, so the longest prompts are left out.
        prompt_flop_at_tokens=first_context(prompt_saved, longest_tokens=LONGEST_TOKENS // 8),
    )


def first_context(
    saved: Callable[[int], bool], *, longest_tokens: int = LONGEST_TOKENS
) -> int | None:
    """Smallest context from which on `saved` holds; None if it does not at `longest_tokens`.

    Savings grow from block to block, but within a block they may shrink: heads that choose on their
    own load the open block once each, exact attention once. So whole blocks of 32 are looked for
    first, then the token.
    """

    def all_saved(block: int) -> bool:
        return saved(block * BLOCK_SIZE + 1) and saved((block + 1) * BLOCK_SIZE)

    block = _first(all_saved, high=longest_tokens // BLOCK_SIZE - 1)
    if block is None:
        return None
    start = block * BLOCK_SIZE
    if block == 0 or not saved(start):
        return start + 1
    inside = _first(lambda i: saved(start - BLOCK_SIZE + 1 + i), high=BLOCK_SIZE - 1)
    return start - BLOCK_SIZE + 1 + (inside or 0)


def _first(holds: Callable[[int], bool], *, high: int) -> int | None:
    """Smallest number up to `high` for which `holds`, if it holds for all above too."""
    if not holds(high):
        return None
    low = -1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _costs(reading: Reading, shape: ModelShape, score: ScoreCost | None = None) -> Costs:
    heads = shape.num_q_heads * shape.num_layers
    dims = score.dims if score is not None else shape.head_dim
    return Costs(
        pairs=reading.pairs,
        attention_flop=heads * attention_flop(reading.pairs, head_dim=shape.head_dim),
        selection_flop=heads * score_flop(reading.scored_keys, dims=dims),
        cache_bytes=reading.loaded_tokens * shape.head_bytes_per_token * shape.num_layers,
        index_bytes=reading.index_bytes * shape.num_layers,
        selection_bytes=reading.selection_bytes * shape.num_layers,
    )
