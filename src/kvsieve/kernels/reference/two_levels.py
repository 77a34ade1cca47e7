"""Choosing on two levels: super-blocks by a few keys, then blocks by all sampled ones.

So that a long context costs little more to choose from than a short one. Source:
docs/selection.md, section 4.
"""

import numpy as np

from kvsieve.kernels.reference.arithmetic import float_dot
from kvsieve.kernels.reference.selection import count_blocks
from kvsieve.types import BLOCK_SIZE, F32, I64

SUPER_BLOCK = 16
"""Selection blocks that stay or go together on the first level: a group of the index."""

MIN_CANDIDATES = 16
"""Super-blocks up to which there is one level: 256 blocks, 8,192 tokens."""


def coarse_positions(num_full: int, *, block_size: int, num_probes: int) -> I64:
    """Positions of the keys that stand for each full block on the first of two levels.

    Of the evenly spaced keys of a block (`probe_positions`), the first and every one that lies
    half of them further: two of 8.

    Returns
    -------
    i64 ``[num_full, P]``
    """
    step = max(1, block_size // max(1, num_probes))
    entries = -(-block_size // step)
    offsets = np.arange(0, entries, max(1, entries // 2), dtype=np.int64) * step
    return np.arange(num_full, dtype=np.int64)[:, None] * block_size + offsets


def coarse_scores(
    q: F32, k: F32, *, scale: float, block_size: int = BLOCK_SIZE, num_probes: int = 8
) -> F32:
    """Coarse scores of one decoded token over plain float keys of full blocks alone.

    Parameters
    ----------
    q : f32 ``[Hq, D]``
    k : f32 ``[Hkv, num_full * block_size, D]``

    Returns
    -------
    f32 ``[Hq, num_full]``
    """
    num_kv_heads, num_tokens, head_dim = k.shape
    positions = coarse_positions(
        num_tokens // block_size, block_size=block_size, num_probes=num_probes
    )
    grouped = (q * np.float32(scale)).reshape(num_kv_heads, -1, head_dim)
    logits = float_dot(grouped, k[:, positions.ravel()])
    best: F32 = logits.reshape(len(q), *positions.shape).max(axis=-1)
    return best


def num_candidates(k: int) -> int:
    """Super-blocks that are scored in full: 16, or what holds twice the budget."""
    return max(MIN_CANDIDATES, 2 * -(-k // SUPER_BLOCK))


def keep_candidates(scores: F32, coarse: F32, k: int) -> F32:
    """Scores with -inf for every block that the first of two levels leaves out.

    16 selection blocks in a row make a super-block. Up to `num_candidates` of them nothing is left
    out. Beyond that, the first and the last super-block and the best of the others are kept: each
    by ``max over heads of (best coarse score of its blocks - that head's best of all)``; ties go
    to the lower index. The open block has no coarse score and is always kept.

    Parameters
    ----------
    scores : f32 ``[..., G, Nb]``, the heads that choose together
    coarse : f32 ``[..., G, num_full]``, best logit of each full block at `coarse_positions`
    k : budget in selection blocks

    Returns
    -------
    f32 ``[..., G, Nb]``
    """
    num_full = coarse.shape[-1]
    num_super, wanted = count_blocks(num_full, SUPER_BLOCK), num_candidates(k)
    if num_super <= wanted:
        return scores
    best = np.maximum.reduceat(coarse, np.arange(0, num_full, SUPER_BLOCK), axis=-1)
    merged = (best - best.max(axis=-1, keepdims=True)).max(axis=-2)
    merged[..., [0, -1]] = np.inf
    order = np.argsort(-merged, axis=-1, kind="stable")[..., :wanted]
    kept = np.zeros((*merged.shape[:-1], num_super), np.bool_)
    np.put_along_axis(kept, order, True, axis=-1)
    is_open = np.ones((*kept.shape[:-1], scores.shape[-1] - num_full), np.bool_)
    blocks = np.concatenate([kept.repeat(SUPER_BLOCK, axis=-1)[..., :num_full], is_open], axis=-1)
    return np.where(blocks[..., None, :], scores, np.float32(-np.inf))
