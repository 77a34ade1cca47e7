"""What a rule reads, for one token and for a prompt: counted, not measured."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from kvsieve.attention.config import SelectorName, SparseAttention
from kvsieve.engine.plan import selector_index, sparse_plan
from kvsieve.errors import ConfigError
from kvsieve.kernels.layout import LANES, AnchorLayout, VectorLayout
from kvsieve.kernels.reference.refinement import num_refined
from kvsieve.kernels.reference.two_levels import (
    SUPER_BLOCK,
    coarse_positions,
    num_candidates,
)
from kvsieve.lab.shape import ModelShape
from kvsieve.types import BLOCK_SIZE

ScanSelector = Literal["scan"]
SELECTORS = (*get_args(SelectorName), *get_args(ScanSelector), "none")
"""``scan`` is no selector of ours: a small vector per token, all of them read for every query."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is read of the past: chosen blocks, a window, or both (then at most their sum).

    sparse         the blocks, and what chooses them; None: no block is chosen
    scan_dims      not None: what chooses is no selector of ours but a scan of an index of so many
                   16-bit dimensions per token and KV head
    window_tokens  the last tokens, the own included, that are read whatever was chosen
    """

    sparse: SparseAttention | None = None
    scan_dims: int | None = None
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.sparse is None and self.window_tokens is None:
            raise ConfigError("[Rule] expected chosen blocks or a window, got neither")
        for name in ("scan_dims", "window_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"[Rule] {name}: expected 1 or more, got {value}")
        if self.scan_dims is not None and self.sparse is None:
            raise ConfigError("[Rule] scan_dims: expected chosen blocks beside it, got none")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Counts of one token, or summed over a prompt, per layer.

    pairs              (query, token) pairs, per query head
    loaded_tokens      tokens whose key and value are loaded, summed over the layer's KV heads
    scored_keys        keys that the selector compares a query with, per query head
    index_bytes        what the selector loads of keys, all heads
    selection_bytes    scores written and read back, importance read, lists written; all heads
    """

    pairs: int
    loaded_tokens: int
    scored_keys: int = 0
    index_bytes: int = 0
    selection_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ScoreCost:
    """What the score of one selection block takes, per query head and per list.

    ``coarse_keys`` and ``coarse_bytes``: on the first of two levels, where the selector has two.
    """

    keys: int
    dims: int
    load_bytes: int
    coarse_keys: int = 0
    coarse_bytes: int = 0

    @classmethod
    def of(cls, rule: Rule, shape: ModelShape) -> "ScoreCost":
        """What the index holds of a block; where there is none, whole pages of keys."""
        sparse, layout = rule.sparse, shape.layout
        if sparse is None:
            return cls(keys=0, dims=shape.head_dim, load_bytes=0)
        size = sparse.block_size
        if rule.scan_dims is not None:
            return cls(keys=size, dims=rule.scan_dims, load_bytes=size * rule.scan_dims * 2)
        if sparse.selector in ("window", "random"):
            return cls(keys=0, dims=shape.head_dim, load_bytes=0)
        if sparse.selector == "oracle":
            load_bytes = size // BLOCK_SIZE * layout.v_offset
            return cls(keys=size, dims=shape.head_dim, load_bytes=load_bytes)
        coarse = coarse_positions(1, block_size=size, num_probes=sparse.num_probes)[0]
        index = selector_index(sparse, layout)
        if isinstance(index, (AnchorLayout, VectorLayout)):
            pages = size // BLOCK_SIZE
            vectors = index.vectors if isinstance(index, AnchorLayout) else index.entries
            load_bytes = pages * index.record_bytes // LANES
            return cls(keys=pages * vectors, dims=shape.head_dim, load_bytes=load_bytes)
        if index is not None:
            load_bytes = index.record_bytes // LANES
            return cls(
                keys=index.entries,
                dims=shape.head_dim,
                load_bytes=load_bytes,
                coarse_keys=len(coarse),
                coarse_bytes=len(coarse) * load_bytes // index.entries,
            )
        step = max(1, size // sparse.num_probes)
        pages = len({position // BLOCK_SIZE for position in range(0, size, step)})
        coarse_pages = len({int(position) // BLOCK_SIZE for position in coarse})
        return cls(
            keys=pages * BLOCK_SIZE,
            dims=shape.head_dim,
            load_bytes=pages * layout.v_offset,
            coarse_keys=coarse_pages * BLOCK_SIZE,
            coarse_bytes=coarse_pages * layout.v_offset,
        )

    def of_blocks(self, coarse: int, fine: int) -> tuple[int, int]:
        """Keys scored and bytes loaded for so many blocks on the first level and the second."""
        return (
            coarse * self.coarse_keys + fine * self.keys,
            coarse * self.coarse_bytes + fine * self.load_bytes,
        )


def exact_token(shape: ModelShape, *, n_tokens: int) -> Reading:
    """A decoded token that sees n tokens reads them all: ``n`` pairs, ``n`` loads per KV head."""
    return Reading(pairs=n_tokens, loaded_tokens=shape.num_kv_heads * n_tokens)


def exact_prompt(shape: ModelShape, *, n_tokens: int) -> Reading:
    """A prompt of n tokens: ``n (n + 1) / 2`` pairs; a tile of 32 queries loads a token once."""
    tiles = list(_tiles(n_tokens))
    return Reading(
        pairs=n_tokens * (n_tokens + 1) // 2,
        loaded_tokens=shape.num_kv_heads * sum(tile.end for tile in tiles),
    )


def rule_token(shape: ModelShape, rule: Rule, *, n_tokens: int) -> Reading:
    """A decoded token under a rule.

    Each list of blocks is loaded on its own: one per KV head under ``share="group"``, else one
    per query head, whose pages a neighbour may have left in the processor's cache.
    """
    sparse = rule.sparse
    window = min(rule.window_tokens or 0, n_tokens)
    plan = sparse_plan(sparse, prompt_len=0, is_prefill=False)
    if sparse is None:
        return Reading(pairs=window, loaded_tokens=shape.num_kv_heads * window)
    if plan is None or not plan.decode_is_sparse(n_tokens):
        return exact_token(shape, n_tokens=n_tokens)
    size, num_blocks = sparse.block_size, -(-n_tokens // sparse.block_size)
    open_tokens = n_tokens - size * (num_blocks - 1)
    # The one place of the original rule goes to a block that the prompt attended to.
    keeps_last = not (sparse.selector == "probe" and sparse.k == 1 and rule.scan_dims is None)
    chosen = (sparse.k - 1) * size + (open_tokens if keeps_last else size)
    read = min(n_tokens, chosen + window)
    lists = shape.num_kv_heads if sparse.sharing == "group" else shape.num_q_heads
    keys, load_bytes = ScoreCost.of(rule, shape).of_blocks(*scored_blocks(rule, n_tokens=n_tokens))
    refined = refined_blocks(rule, n_tokens=n_tokens)
    keys += refined * size
    # The chosen ones' keys are loaded once, with their values, and counted there.
    load_bytes += max(0, refined - sparse.k) * size // BLOCK_SIZE * shape.layout.v_offset
    importance = rule.scan_dims is None and sparse.uses_importance
    return Reading(
        pairs=read,
        loaded_tokens=lists * read,
        scored_keys=keys,
        index_bytes=lists * load_bytes,
        selection_bytes=lists * 4 * (2 * num_blocks + sparse.k)
        + (8 * n_tokens if importance else 0),
    )


def rule_prompt(shape: ModelShape, rule: Rule, *, n_tokens: int) -> Reading:
    """A prompt under a rule, tile by tile: one list per (KV head, tile), scored by all its rows."""
    sparse = rule.sparse
    plan = sparse_plan(sparse, prompt_len=n_tokens, is_prefill=True)
    cost = ScoreCost.of(rule, shape)
    pairs = loaded = scored = index = selection = 0
    for tile in _tiles(n_tokens):
        tile_pairs, tile_loaded = tile.exact_pairs, tile.end
        if sparse is None:
            tile_pairs = tile_loaded = 0
        elif plan is not None and plan.tile_is_sparse(tile.number):
            earlier = tile.number * BLOCK_SIZE // plan.block_size
            skipped = (earlier - (plan.k - 1)) * plan.block_size
            tile_pairs -= tile.rows * skipped
            tile_loaded -= skipped
            scored += tile.rows * earlier * cost.keys
            index += earlier * cost.load_bytes
            selection += 4 * (2 * earlier * tile.rows * shape.group_size + plan.k)
        if rule.window_tokens is not None:
            tile_pairs = min(tile.exact_pairs, tile_pairs + tile.window_pairs(rule.window_tokens))
            tile_loaded = min(tile.end, tile_loaded + tile.window_loads(rule.window_tokens))
        pairs += tile_pairs
        loaded += tile_loaded
    return Reading(
        pairs=pairs,
        loaded_tokens=shape.num_kv_heads * loaded,
        scored_keys=scored,
        index_bytes=shape.num_kv_heads * index,
        selection_bytes=shape.num_kv_heads * selection,
    )


def scored_blocks(rule: Rule, *, n_tokens: int) -> tuple[int, int]:
    """Blocks that a decoded token scores coarsely and finely (docs/selection.md, section 4).

    All N blocks finely; with selector ``even`` and more super-blocks than candidates, all full ones
    coarsely, then those of the candidates and the open one finely.
    """
    sparse = rule.sparse
    if sparse is None:
        return 0, 0
    full, open_tokens = divmod(n_tokens, sparse.block_size)
    num_blocks, candidates = full + (open_tokens > 0), num_candidates(sparse.k)
    has_two_levels = sparse.selector == "even" and rule.scan_dims is None
    if not has_two_levels or -(-full // SUPER_BLOCK) <= candidates:
        return 0, num_blocks
    # The last super-block is always a candidate, and may not be full.
    missing = -full % SUPER_BLOCK
    return full, candidates * SUPER_BLOCK - missing + (open_tokens > 0)


def refined_blocks(rule: Rule, *, n_tokens: int) -> int:
    """Blocks all of whose keys a decoded token looks at before it chooses: selector ``anchors``."""
    sparse = rule.sparse
    if sparse is None or sparse.selector != "anchors" or rule.scan_dims is not None:
        return 0
    return min(num_refined(sparse.k), -(-n_tokens // sparse.block_size))


def first_sparse_tokens(sparse: SparseAttention) -> int:
    """Tokens that a decoded token must see, itself included, before it is sparse at all."""
    return max(2 * BLOCK_SIZE, sparse.k * sparse.block_size) + 1


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Queries of positions ``[32 number, end)``."""

    number: int
    end: int

    @property
    def start(self) -> int:
        return self.number * BLOCK_SIZE

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def exact_pairs(self) -> int:
        return self.rows * self.start + self.rows * (self.rows + 1) // 2

    def window_pairs(self, width: int) -> int:
        """Sum of ``min(width, position + 1)`` over the rows."""
        full = max(0, min(self.rows, self.end - width + 1))  # rows whose window is full
        short = self.rows - full
        return full * width + short * self.start + short * (short + 1) // 2

    def window_loads(self, width: int) -> int:
        """From what the first row sees to the last row."""
        return self.end - max(0, self.start + 1 - width)


def _tiles(n_tokens: int) -> Iterator[_Tile]:
    for number in range(-(-n_tokens // BLOCK_SIZE)):
        yield _Tile(number=number, end=min((number + 1) * BLOCK_SIZE, n_tokens))
