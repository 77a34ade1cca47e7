"""Selectors ``minmax``, ``mean`` and ``meanstd``: one or two vectors that stand for a block.

Each vector is a q8 row, and meets int8 codes that are made of the query's. A block's score is the
sum of the dot products, exact integers times one product of two scales each: the same bits on
every machine, whatever the type of the keys.

===========  ==============================================  ==================================
rule         vectors, per channel over the block's 32 keys   codes, of the query's codes ``c``
===========  ==============================================  ==================================
``minmax``   largest key, smallest key                       ``max(c, 0)``, ``min(c, 0)``
``mean``     mean                                            ``c``
``meanstd``  mean, standard deviation                        ``c``, ``abs(c)``
===========  ==============================================  ==================================

Bounds are rounded outward, so that they are bounds in 8 bits too. The open block has no record: its
best visible key's logit is its score. Source: docs/selection.md, section 4.
"""

import numpy as np

from kvsieve.kernels.backend import Segment
from kvsieve.kernels.layout import LANES, VectorLayout, VectorRule
from kvsieve.kernels.reference.arithmetic import int_dot
from kvsieve.kernels.reference.logits import logits
from kvsieve.kernels.reference.pages import U8_ZERO, index_views, read_keys
from kvsieve.kernels.reference.quantize import Q8_MAX, Rows, quantize_q8
from kvsieve.types import BLOCK_SIZE, F32, I8, U8


# -- plain arrays -------------------------------------------------------------------------------
def summarize(keys: F32, rule: VectorRule) -> Rows:
    """What stands for each block.

    Parameters
    ----------
    keys : f32 ``[..., 32, D]``

    Returns
    -------
    Rows ``[..., entries, D]``, q8. Sums run over ascending tokens.
    """
    if rule == "minmax":
        largest = round_outward(keys.max(axis=-2), up=True)
        smallest = round_outward(keys.min(axis=-2), up=False)
        return _stacked(largest, smallest)
    count = np.float32(BLOCK_SIZE)
    mean = (np.add.accumulate(keys, axis=-2)[..., -1, :] / count).astype(np.float32)
    if rule == "mean":
        return quantize_q8(mean[..., None, :])
    distance = keys - mean[..., None, :]
    squares = np.add.accumulate(distance * distance, axis=-2)[..., -1, :]
    return _stacked(quantize_q8(mean), quantize_q8(np.sqrt(squares / count)))


def round_outward(x: F32, *, up: bool) -> Rows:
    """q8 rows nowhere below `x` (`up`), or nowhere above it: ``code * scale`` as real numbers.

    The scale is ``max|x| / 127``, or the next float32 where 127 of that would fall short.
    """
    largest = np.abs(x).max(axis=-1, keepdims=True)
    scales = largest / np.float32(Q8_MAX)
    short = scales.astype(np.float64) * Q8_MAX < largest
    scales = np.where(short, np.nextafter(scales, np.float32(np.inf)), scales)
    quotient = np.zeros_like(x)
    np.divide(x, scales, out=quotient, where=scales != 0)
    codes = np.ceil(quotient) if up else np.floor(quotient)
    value = codes * scales.astype(np.float64)  # exact: 7 and 24 bits
    codes = codes + (value < x) if up else codes - (value > x)  # the quotient was rounded
    return Rows(values=codes.astype(np.int8), scales=scales)


def query_codes(codes: I8, rule: VectorRule) -> tuple[I8, ...]:
    """What each vector of a block meets, one array like `codes` per vector."""
    if rule == "minmax":
        return np.maximum(codes, 0), np.minimum(codes, 0)
    if rule == "mean":
        return (codes,)
    return codes, np.abs(codes)


def vector_scores(q: Rows, vectors: Rows, rule: VectorRule) -> F32:
    """Scores of blocks from their vectors: f32 ``[R, N]``.

    Parameters
    ----------
    q : Rows ``[R, D]``, folded; taken as q8 whatever the keys are
    vectors : Rows ``[N, entries, D]`` of `summarize`
    """
    codes = q if q.scales is not None else quantize_q8(q.values)
    assert codes.scales is not None
    assert vectors.scales is not None
    total: F32 | None = None
    for entry, met in enumerate(query_codes(codes.values, rule)):
        scale = vectors.scales[:, entry, 0] * codes.scales
        part = int_dot(met, vectors.values[:, entry]) * scale
        total = part if total is None else total + part
    assert total is not None  # every rule has a vector
    return total


def _stacked(first: Rows, second: Rows) -> Rows:
    assert first.scales is not None
    assert second.scales is not None
    return Rows(
        values=np.stack([first.values, second.values], axis=-2),
        scales=np.stack([first.scales, second.scales], axis=-2),
    )


# -- a segment ----------------------------------------------------------------------------------
def complete_vectors(segment: Segment, layer: int) -> None:
    """Write the records of the blocks whose last token is among a segment's rows."""
    layout, index = segment.index_layout, segment.index
    if not isinstance(layout, VectorLayout) or index is None:
        return
    heads = range(segment.pages.shape[2])
    for block in range(segment.start // BLOCK_SIZE, (segment.start + segment.q_len) // BLOCK_SIZE):
        at = np.array([block], dtype=np.int32)
        keys = np.stack([read_keys(segment, layer, head, at).floats() for head in heads])
        _write_lane(
            index[layer, block // LANES], layout, block % LANES, summarize(keys, layout.rule)
        )


def segment_scores(
    segment: Segment, layer: int, kv_head: int, *, q: Rows, num_tokens: int, block_size: int
) -> F32:
    """Scores of the selection blocks of the first `num_tokens` tokens: f32 ``[R, Ns]``.

    A selection block is as good as the best of its blocks of 32.

    Parameters
    ----------
    q : Rows ``[R, D]``, folded
    """
    layout, index = segment.index_layout, segment.index
    assert isinstance(layout, VectorLayout)
    assert index is not None  # check_segment saw to both
    full, visible = divmod(num_tokens, BLOCK_SIZE)
    parts = []
    if full:
        vectors = _read_lanes(index[layer, :, kv_head], layout, full)
        parts.append(vector_scores(q, vectors, layout.rule))
    if visible:
        keys = read_keys(segment, layer, kv_head, np.array([full], dtype=np.int32))
        parts.append(logits(q, keys)[:, :visible].max(axis=1, keepdims=True))
    scores = np.concatenate(parts, axis=1)
    starts = np.arange(0, scores.shape[1], block_size // BLOCK_SIZE)
    best: F32 = np.maximum.reduceat(scores, starts, axis=1)
    return best


def _write_lane(records: U8, layout: VectorLayout, lane: int, vectors: Rows) -> None:
    """One block's vectors ``[Hkv, entries, D]`` into ``records [Hkv, record_bytes]``."""
    codes, scales = index_views(records, layout)
    chunks = vectors.values.reshape(len(records), layout.entries, -1, 4)
    codes[:, :, :, lane] = (chunks.astype(np.int16) + U8_ZERO).astype(np.uint8)
    assert vectors.scales is not None
    scales[:, :, lane] = vectors.scales[..., 0]


def _read_lanes(records: U8, layout: VectorLayout, num_blocks: int) -> Rows:
    """Vectors of the first `num_blocks` blocks, ``[N, entries, D]``."""
    codes, scales = index_views(records, layout)
    by_block = np.moveaxis(codes, -2, 1).reshape(-1, layout.entries, layout.head_dim)[:num_blocks]
    by_lane = np.moveaxis(scales, -1, 1).reshape(-1, layout.entries, 1)[:num_blocks]
    return Rows(values=(by_block.astype(np.int16) - U8_ZERO).astype(np.int8), scales=by_lane)
