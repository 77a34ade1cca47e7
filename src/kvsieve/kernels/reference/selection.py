"""Which blocks a query reads: scores, the two selectors, and the lists of sparse prefill.

Pure functions over plain arrays. They never look at a cache, a page or a model: the logits of a
few sampled keys go in, block numbers come out. In short,

1. sample a few evenly spaced keys of each block and keep their largest logit (`probe_scores`);
2. choose ``k`` blocks: the original rule (`pick_probe`), ours with guards (`pick_even`), or one
   choice for a whole tile of prompt rows (`pick_prefill`);
3. write the chosen *selection blocks* as blocks of 32 (`expand_blocks`).

A selection block is ``block_size`` tokens, 32 or a multiple of it, counted from position 0; all
scores, guards and budgets are in selection blocks. Every tie goes to the lower index. Nothing is
random. Source: docs/selection.md, sections 2 to 6.
"""

from collections.abc import Sequence

import numpy as np

from kvsieve.kernels.backend import BlockLists
from kvsieve.kernels.reference.arithmetic import float_dot
from kvsieve.types import BLOCK_SIZE, F32, I32, I64

MIN_SPARSE_TOKENS = 2 * BLOCK_SIZE
"""Up to this many visible tokens a query is always exact."""


# -- the gate (section 2) -----------------------------------------------------------------------
def count_blocks(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that hold `num_tokens` tokens, the open one included."""
    return -(-num_tokens // block_size)


def decode_is_sparse(num_tokens: int, k: int, *, block_size: int = BLOCK_SIZE) -> bool:
    """Whether a decoded token that sees `num_tokens` tokens (itself included) reads a selection."""
    return num_tokens > MIN_SPARSE_TOKENS and count_blocks(num_tokens, block_size) > k


def tile_is_sparse(
    tile: int, k: int, *, exact_from_tile: int, block_size: int = BLOCK_SIZE
) -> bool:
    """Whether prompt tile `tile` (a block of 32 positions) reads a selection.

    Its first row sees ``32 * tile + 1`` tokens, more than 64 from tile 2 on. Selection blocks
    are counted up to and including the one that holds the tile.
    """
    own = tile * BLOCK_SIZE // block_size
    return 2 <= tile < exact_from_tile and own + 1 > k


# -- scores (section 3, step 1) -----------------------------------------------------------------
def probe_positions(num_tokens: int, *, block_size: int, num_probes: int) -> tuple[I64, I64]:
    """Positions of the keys that stand for each block.

    Block ``[p0, p1)`` is sampled at ``p0, p0 + step, p0 + 2 * step, ... < p1`` with
    ``step = max(1, (p1 - p0) // num_probes)``. With 8 probes a full block of 32 gives 8 keys, an
    open one of 9 tokens all 9, one of 31 tokens 11.

    Returns
    -------
    positions : i64 ``[P]``, ascending
    offsets : i64 ``[Nb]``, where each block's positions begin
    """
    samples = []
    for start in range(0, num_tokens, block_size):
        stop = min(start + block_size, num_tokens)
        step = max(1, (stop - start) // max(1, num_probes))
        samples.append(np.arange(start, stop, step, dtype=np.int64))
    counts = np.array([len(sample) for sample in samples], dtype=np.int64)
    positions = np.concatenate(samples) if samples else np.zeros(0, dtype=np.int64)
    return positions, np.cumsum(counts) - counts


def score_probes(logits: F32, offsets: I64) -> F32:
    """Score of each block: the **maximum** of its sampled logits, not the first or the mean.

    Parameters
    ----------
    logits : f32 ``[..., P]`` at the positions of `probe_positions`
    offsets : i64 ``[Nb]``

    Returns
    -------
    f32 ``[..., Nb]``
    """
    return np.maximum.reduceat(logits, offsets, axis=-1)


def probe_scores(
    q: F32, k: F32, *, scale: float, block_size: int = BLOCK_SIZE, num_probes: int = 8
) -> F32:
    """Block scores of one decoded token over plain float keys.

    Parameters
    ----------
    q : f32 ``[Hq, D]``; query head ``h`` reads KV head ``h // (Hq // Hkv)``
    k : f32 ``[Hkv, Tkv, D]``, all visible keys
    scale : softmax scale, folded into q before the product

    Returns
    -------
    f32 ``[Hq, Nb]``
    """
    num_kv_heads, num_tokens, head_dim = k.shape
    positions, offsets = probe_positions(num_tokens, block_size=block_size, num_probes=num_probes)
    grouped = (q * np.float32(scale)).reshape(num_kv_heads, -1, head_dim)
    logits = float_dot(grouped, k[:, positions])
    return score_probes(logits, offsets).reshape(len(q), -1)


def prefill_scores(
    q: F32,
    k: F32,
    *,
    num_blocks: int,
    scale: float,
    block_size: int = BLOCK_SIZE,
    num_probes: int = 8,
) -> F32:
    """Merged scores of one prompt tile over plain float keys (see `merge_tile`).

    Parameters
    ----------
    q : f32 ``[Hq, R, D]``, the rows of the tile
    k : f32 ``[Hkv, >= num_blocks * block_size, D]``
    num_blocks : selection blocks before the one that holds the tile, all of them full

    Returns
    -------
    f32 ``[Hkv, num_blocks]``
    """
    num_kv_heads, _, head_dim = k.shape
    positions, offsets = probe_positions(
        num_blocks * block_size, block_size=block_size, num_probes=num_probes
    )
    grouped = (q * np.float32(scale)).reshape(num_kv_heads, -1, head_dim)
    scores = score_probes(float_dot(grouped, k[:, positions]), offsets)
    return merge_tile(scores)


# -- one selection for several queries (sections 4 and 6) ---------------------------------------
def merge_group(scores: F32, *, num_full: int) -> F32:
    """One score per block for the query heads that share a KV head (decode).

    ``max over heads of (score - that head's maximum)``: heads differ in how large their logits
    are, so each is measured from its own best block. The maximum leaves out the open block, if
    there is one: its score comes from other keys (step 1 follows its length) and it is kept anyway.

    Parameters
    ----------
    scores : f32 ``[..., G, Nb]``, the heads of one group
    num_full : full blocks, ``num_tokens // block_size``: Nb, or Nb - 1 where the last one is open.
        An open block that is the only one counts, so that there is a maximum.

    Returns
    -------
    f32 ``[..., Nb]``
    """
    best = scores[..., : max(1, num_full)].max(axis=-1, keepdims=True)
    merged: F32 = (scores - best).max(axis=-2)
    return merged


def merge_tile(scores: F32) -> F32:
    """One score per block for all rows of a prompt tile and all query heads of a group.

    ``max over rows of (score - that row's maximum)`` over the blocks before the tile's own, guards
    included in the maximum.

    Parameters
    ----------
    scores : f32 ``[..., G * R, J]``, one row per (query head, token)

    Returns
    -------
    f32 ``[..., J]``
    """
    best = scores.max(axis=-1, keepdims=True)
    merged: F32 = (scores - best).max(axis=-2)
    return merged


# -- the selectors ------------------------------------------------------------------------------
def pick_probe(scores: F32, importance_sums: I64 | None, k: int) -> I32:
    """Selector ``probe``, the original rule (section 3, steps 2 to 4).

    Half of the budget, rounded up, is reserved for the blocks that the prompt attended to most; the
    rest goes to the best scores; the last block takes the place of the worst of *those*. A
    reserved block is never evicted, so with ``k = 1`` and importance the last block is lost: that
    is the original's failure mode, and it is kept on purpose.

    Parameters
    ----------
    scores : f32 ``[Nb]``
    importance_sums : i64 ``[Nb]`` (`importance_block_sums`), or None: nothing is reserved
    k : budget in blocks, at least 1

    Returns
    -------
    i32 ``[min(k, Nb)]``, ascending; ties go to the lower index, and of equally bad filled blocks
    the one with the highest index makes room for the last block
    """
    num_blocks = len(scores)
    reserved: list[int] = []
    if importance_sums is not None:
        reserved = _best_first(importance_sums)[: min((k + 1) // 2, num_blocks)]
    filled = _fill(scores, reserved, k)
    last = num_blocks - 1
    if last not in reserved and last not in filled and filled:
        filled[-1] = last
    return _ascending(reserved + filled)


def pick_even(scores: F32, k: int) -> I32:
    """Selector ``even`` (section 4): guards first, then the best scores.

    The guards are, in this order of precedence, the last block, block 0 (the sink) and the one
    before the last; they count against the budget.

    Parameters
    ----------
    scores : f32 ``[Nb]``
    k : budget in blocks, at least 1

    Returns
    -------
    i32 ``[min(k, Nb)]``, ascending; ties go to the lower index
    """
    last = len(scores) - 1
    guards = _first_distinct([last, 0, last - 1], k)
    return _ascending(guards + _fill(scores, guards, k))


def pick_prefill(scores: F32, k: int) -> I32:
    """Selection of a prompt tile (section 6): its own block, then guards, then the best scores.

    The guards are, in this order of precedence, the tile's own block, the one before it and
    block 0 (in decode it is the other way round). Only blocks before the tile's own have a score,
    so causality comes before the choice: a future block can never push a past one out.

    Parameters
    ----------
    scores : f32 ``[J]`` (`merge_tile`) of the selection blocks before the tile's own
    k : budget in selection blocks, at least 1

    Returns
    -------
    i32 ``[min(k, J + 1)]``, ascending; ``J`` is the tile's own block
    """
    own = len(scores)
    guards = _first_distinct([own, own - 1, 0], k)
    return _ascending(guards + _fill(scores, guards, k))


def pick_mass(shares: F32, *, mass: float, k_min: int, k: int, guards: Sequence[int]) -> I32:
    """Selection by mass (section 4): guards, then by share until the chosen hold `mass`.

    Parameters
    ----------
    shares : f32 ``[Nb]``, summing to 1; added up in f32, guards in ascending order first
    mass : share to reach
    k_min, k : blocks to take at least and at most
    guards : in order of precedence; as many as `k` allows are taken

    Returns
    -------
    i32, ascending; ties go to the lower index
    """
    taken = _first_distinct(guards, k)
    reached = np.float32(0)
    for block in sorted(taken):
        reached += shares[block]
    for block in _best_first(shares):
        if len(taken) >= k or (len(taken) >= k_min and reached >= np.float32(mass)):
            break
        if block not in taken:
            taken.append(block)
            reached += shares[block]
    return _ascending(taken)


def pick_window(num_blocks: int, k: int) -> I32:
    """Selector ``window``: the last `k` blocks, block 0 in place of the oldest of them.

    With ``k = 1`` the last block alone.
    """
    first = max(0, num_blocks - k)
    blocks = list(range(first, num_blocks))
    if k > 1:
        blocks[0] = 0
    return _ascending(blocks)


def importance_block_sums(importance: I64, block_size: int = BLOCK_SIZE) -> I64:
    """Importance of each block: the sum over **all** of its tokens, sampled or not.

    Parameters
    ----------
    importance : i64 ``[n]`` of the visible tokens of one layer, in units of 2**-24

    Returns
    -------
    i64 ``[Nb]``
    """
    starts = np.arange(0, len(importance), block_size)
    return np.add.reduceat(importance, starts)


# -- lists of blocks of 32 ----------------------------------------------------------------------
def expand_blocks(selected: I32, *, block_size: int, num_blocks: int) -> I32:
    """Blocks of 32 that make up the selection blocks, without those from `num_blocks` on.

    Parameters
    ----------
    selected : i32, ascending selection blocks
    num_blocks : causal blocks of 32; the last selection block may be cut short by it

    Returns
    -------
    i32, ascending, unique
    """
    per_block = block_size // BLOCK_SIZE
    blocks = (selected[:, None] * per_block + np.arange(per_block, dtype=np.int32)).ravel()
    return blocks[blocks < num_blocks].astype(np.int32)


def causal_blocks(tile: int, *, window: int = 0) -> I32:
    """What an exact tile reads: blocks 0 to its own, or those that its first row's window meets.

    The first row's, so that every row of a tile has the same list, in a prompt and decoded alone.
    """
    first = max(0, tile * BLOCK_SIZE - window + 1) // BLOCK_SIZE if window else 0
    return np.arange(first, tile + 1, dtype=np.int32)


def block_lists(rows: Sequence[I32], *, num_heads: int) -> BlockLists:
    """Lists in CSR form; `rows` in the order ``head * num_tiles + tile``."""
    lengths = np.array([0, *(len(row) for row in rows)], dtype=np.int64)
    return BlockLists(
        num_heads=num_heads,
        num_tiles=len(rows) // num_heads,
        indptr=np.cumsum(lengths),
        indices=np.concatenate(rows).astype(np.int32),
    )


# -- shared by the selectors --------------------------------------------------------------------
def _best_first(values: F32 | I64) -> list[int]:
    """Indices by falling value, equal ones by rising index."""
    order: list[int] = np.argsort(-values, kind="stable").tolist()
    return order


def _fill(scores: F32, taken: Sequence[int], k: int) -> list[int]:
    """The best blocks that are not `taken`, best first, as many as the budget has places left."""
    free = [block for block in _best_first(scores) if block not in taken]
    return free[: max(0, k - len(taken))]


def _first_distinct(guards: Sequence[int], k: int) -> list[int]:
    """The first `k` guards that exist, each once: short contexts make some of them coincide."""
    return list(dict.fromkeys(guard for guard in guards if guard >= 0))[:k]


def _ascending(blocks: Sequence[int]) -> I32:
    return np.array(sorted(blocks), dtype=np.int32)
