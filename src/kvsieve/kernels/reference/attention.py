"""Exact attention over a list of blocks, with the softmax normalised over that list only.

A list is read in *runs* of 16 blocks. Each run is a small attention from scratch: its own
maximum ``m``, the sum ``s`` of ``exp(logit - m)`` and the unnormalised output ``o``. Runs are
merged in order, and the end result is ``o / s``. Nothing in a run depends on the other runs or on
the other rows, so a row's bits are the same in a prompt, in decode and in any batch.
Source: docs/selection.md, section 1.
"""

from dataclasses import dataclass

import numpy as np

from kvsieve.errors import ShapeError
from kvsieve.kernels.backend import BlockLists, Segment
from kvsieve.kernels.reference.arithmetic import exp, fma, int_dot
from kvsieve.kernels.reference.logits import fold_queries, logits
from kvsieve.kernels.reference.pages import block_positions, read_keys, read_values, tiles
from kvsieve.kernels.reference.quantize import Rows, inverse_of_largest
from kvsieve.kernels.reference.selection import causal_blocks
from kvsieve.types import BLOCK_SIZE, BLOCKS_PER_RUN, F32, I32, I64, AnyArray, Bool

IMPORTANCE_UNIT = 2**24
"""Importance counts in units of 2**-24: integers, so that the order of additions cannot matter."""

PROBABILITY_MAX = 255


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Attention of R rows over some of the tokens, before normalisation.

    m  ``f32 [R]``: largest visible logit; -inf where the row saw no token
    s  ``f32 [R]``: sum of ``exp(logit - m)``
    o  ``f32 [R, D]``: sum of ``exp(logit - m) * v``
    """

    m: F32
    s: F32
    o: F32


@dataclass(frozen=True, kw_only=True)
class RunWeights:
    """What each token of a run weighed: ``p = exp(logit - m)``, f32 ``[R, N]``, at `positions`."""

    positions: I64
    p: F32
    m: F32


# -- a run --------------------------------------------------------------------------------------
def attend_run(q: Rows, keys: Rows, values: Rows, *, visible: Bool) -> tuple[Partial, F32]:
    """Attention over the blocks of one run, from scratch.

    Parameters
    ----------
    q : Rows ``[R, D]``
    keys, values : Rows ``[N, D]``, N a multiple of 32
    visible : bool ``[R, N]``; a listed block may hold tokens that a row must not see

    Returns
    -------
    The partial result, and ``p`` f32 ``[R, N]``, 0 where not visible. `s` is accumulated in float64
    and rounded once.
    """
    masked = np.where(visible, logits(q, keys), -np.inf).astype(np.float32)
    m = masked.max(axis=1)
    # Where no token is visible, m is -inf, and -inf - -inf would be NaN.
    p = exp(masked - np.where(np.isfinite(m), m, np.float32(0))[:, None])
    s = p.sum(axis=1, dtype=np.float64).astype(np.float32)
    return Partial(m=m, s=s, o=_weighted_sum(p, values)), p


def _weighted_sum(p: F32, values: Rows) -> F32:
    """``sum over tokens of p * v``: f32 ``[R, D]``."""
    o: F32 = np.zeros((len(p), values.values.shape[1]), dtype=np.float32)
    if values.scales is None:
        for token in range(len(values.values)):
            o = fma(p[:, token, None], values.values[token], o)
        return o
    num_groups = values.scales.shape[1]
    channels = np.split(values.values, num_groups, axis=1)
    sums = [_integer_sum(p, channels[g], values.scales[:, g]) for g in range(num_groups)]
    return np.concatenate(sums, axis=1)


def _integer_sum(p: F32, codes: AnyArray, scales: F32) -> F32:
    """The same over integer values of one scale group: codes i8 ``[N, C]``, scales f32 ``[N]``.

    Page by page, ``w = p * |scale|`` becomes unsigned 8 bits with one factor, so that the sum over
    the page's tokens is an integer dot product. The sign of a q4_0 scale goes to the codes.
    """
    signed = np.where(scales[:, None] < 0, -codes, codes).reshape(-1, BLOCK_SIZE, codes.shape[1])
    w = (p * np.abs(scales)).reshape(len(p), -1, BLOCK_SIZE)
    largest = w.max(axis=2)
    inverse = inverse_of_largest(largest, PROBABILITY_MAX)
    weights = np.rint(w * inverse[:, :, None]).astype(np.uint8)
    factor = largest / np.float32(PROBABILITY_MAX)
    o: F32 = np.zeros((len(p), codes.shape[1]), dtype=np.float32)
    for page in range(len(signed)):
        o = fma(int_dot(weights[:, page], signed[page].T), factor[:, page, None], o)
    return o


def merge(a: Partial, b: Partial) -> Partial:
    """Two partial results as if their tokens had been seen together, `b` after `a`.

    A side that saw no token has ``m = -inf``: it is scaled by ``exp(-inf) = 0`` and the other side
    by 1, which leaves its bits alone. If neither saw one, 0 stands in for the maximum, because
    ``exp(-inf - -inf)`` would be a NaN that no later run could repair.
    """
    m = np.maximum(a.m, b.m)
    shift = np.where(np.isfinite(m), m, np.float32(0))
    keep_a, keep_b = exp(a.m - shift), exp(b.m - shift)
    return Partial(
        m=m,
        s=a.s * keep_a + b.s * keep_b,
        o=fma(a.o, keep_a[:, None], b.o * keep_b[:, None]),
    )


# -- rows that share a list ---------------------------------------------------------------------
def attend_rows(
    segment: Segment,
    layer: int,
    kv_head: int,
    *,
    q: Rows,
    positions: I64,
    blocks: I32,
    window: int = 0,
) -> tuple[Partial, list[RunWeights]]:
    """Attention of some rows over the listed blocks of one KV head.

    Parameters
    ----------
    q : Rows ``[R, D]``
    positions : i64 ``[R]``; a row sees the tokens up to its own position
    window : of those, only the last `window`; 0: all
    blocks : i32, ascending

    Raises
    ------
    ShapeError
        A row sees no token at all.
    """
    total: Partial | None = None
    weights = []
    for first in range(0, len(blocks), BLOCKS_PER_RUN):
        run = blocks[first : first + BLOCKS_PER_RUN]
        tokens = block_positions(run)
        visible = tokens <= positions[:, None]
        if window:
            visible &= tokens > positions[:, None] - window
        part, p = attend_run(
            q,
            read_keys(segment, layer, kv_head, run),
            read_values(segment, layer, kv_head, run),
            visible=visible,
        )
        weights.append(RunWeights(positions=tokens, p=p, m=part.m))
        total = part if total is None else merge(total, part)
    if total is None or not total.s.all():
        raise ShapeError("[attend] lists: expected a visible token for every row, got none")
    return total, weights


def token_importance(total: Partial, run: RunWeights) -> I64:
    """Final probability of each token of a run, summed over the rows, in units of 2**-24.

    Each probability is rounded on its own, then added as an integer: i64 ``[N]``.
    """
    factor = exp(run.m - total.m) / total.s
    units = np.rint(run.p * factor[:, None] * np.float32(IMPORTANCE_UNIT))
    summed: I64 = units.astype(np.int64).sum(axis=0)
    return summed


# -- a segment ----------------------------------------------------------------------------------
def attend(
    segment: Segment,
    layer: int,
    q: F32,
    *,
    scale: float,
    lists: BlockLists | None,
    window: int = 0,
) -> F32:
    """Attention of a segment's rows over the blocks of `lists`, or over all causal ones.

    Parameters
    ----------
    q : f32 ``[Tq, Hq, D]``; query head ``h`` reads KV head ``h // (Hq // Hkv)``. The segment's own
        keys and values have been appended already.
    lists : one list per (KV head or query head, tile), or None: exact
    window : only the last `window` tokens up to its own are visible to a row; 0: all

    Returns
    -------
    f32 ``[Tq, Hq, D]``. Adds to ``segment.importance[layer]`` if ``record_importance`` is set.

    Raises
    ------
    ShapeError
        The lists do not fit the segment, or a row sees no token.
    """
    num_q_heads, num_kv_heads = q.shape[1], segment.pages.shape[2]
    num_lists = num_kv_heads if lists is None else lists.num_heads
    sharing = num_q_heads // num_lists
    folded = fold_queries(q, segment.layout.k_type, scale=scale)
    out = np.empty_like(q)
    for tile, rows in tiles(segment):
        for head in range(num_lists):
            heads = slice(head * sharing, (head + 1) * sharing)
            blocks = listed_blocks(lists, head, tile, segment, window=window)
            total, weights = attend_rows(
                segment,
                layer,
                head * sharing // (num_q_heads // num_kv_heads),
                q=folded.take((rows, heads)).flat(),
                positions=np.repeat(np.arange(rows.start, rows.stop) + segment.start, sharing),
                blocks=blocks,
                window=window,
            )
            out[rows, heads] = (total.o / total.s[:, None]).reshape(out[rows, heads].shape)
            if segment.record_importance and segment.importance is not None:
                for run in weights:
                    _add_importance(segment, layer, run.positions, token_importance(total, run))
    return out


def listed_blocks(
    lists: BlockLists | None, head: int, tile: int, segment: Segment, *, window: int = 0
) -> I32:
    """The blocks of one (head, tile); `tile` counts from position 0, rows of `lists` do not."""
    if lists is None:
        return causal_blocks(tile, window=window)
    row = head * lists.num_tiles + tile - segment.start // BLOCK_SIZE
    return lists.indices[lists.indptr[row] : lists.indptr[row + 1]]


def _add_importance(segment: Segment, layer: int, positions: I64, units: I64) -> None:
    written = positions < segment.start + segment.q_len
    if segment.importance is not None:
        segment.importance[layer, positions[written]] += units[written]
