"""Selector ``anchors``: what its index holds of a block, and the block's attention mass from it.

A block's record is made when the last row of the block behind it runs: the keys which that row
attends to most, the mean of the others, and how far these spread around it. For a query, the mass
of the block is then the sum of the anchors' exponentials and 30 times that of the mean, raised by
a part of the variance that the spread gives its logits. The two newest
blocks have no record yet and count exactly. Source: docs/selection.md, section 4.
"""

from dataclasses import dataclass

import numpy as np

from kvsieve.kernels.backend import Segment
from kvsieve.kernels.layout import LANES, NUM_ANCHORS, NUM_BANDS, AnchorLayout
from kvsieve.kernels.reference.arithmetic import exp, int_dot
from kvsieve.kernels.reference.logits import logits
from kvsieve.kernels.reference.pages import U8_ZERO, read_keys, record_views
from kvsieve.kernels.reference.quantize import Rows, quantize_q8
from kvsieve.types import BLOCK_SIZE, F32, I8, I32, I64, U8

NUM_OTHERS = BLOCK_SIZE - NUM_ANCHORS

SPREAD_GAIN = np.float32(0.2)
"""Share of the logits' variance that raises the mean's: a normal distribution would give a half."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What stands for each block.

    codes    i8 ``[Nb, vectors, D]``: the anchors, then the mean of the others
    scales   f32 ``[Nb, vectors]``
    spreads  f32 ``[Nb, NUM_BANDS]``: mean squared distance of the others from their mean, per run
             of ``D / NUM_BANDS`` channels
    """

    codes: I8
    scales: F32
    spreads: F32


# -- plain arrays -------------------------------------------------------------------------------
def received(block_logits: F32) -> F32:
    """Attention that each token of a block receives from one row, summed over query heads.

    Parameters
    ----------
    block_logits : f32 ``[Hq, 64]``, of the block's tokens and those of the block behind it; each
        head attends to these alone

    Returns
    -------
    f32 ``[32]``; every sum runs in order, from token or head 0
    """
    weights = exp(block_logits - block_logits.max(axis=1, keepdims=True))
    sums = np.add.accumulate(weights, axis=1)[:, -1:]
    total: F32 = np.add.accumulate(weights[:, :BLOCK_SIZE] / sums, axis=0)[-1]
    return total


def choose_anchors(attention: F32) -> I32:
    """The tokens that received most, best first; ties go to the earlier one."""
    return np.argsort(-attention, kind="stable")[:NUM_ANCHORS].astype(np.int32)


def summarize(keys: F32, chosen: I32) -> Summary:
    """Records of one block's heads.

    Parameters
    ----------
    keys : f32 ``[Hkv, 32, D]``
    chosen : i32 ``[NUM_ANCHORS]``, the same for every head

    Returns
    -------
    Summary, its first axis the heads. Sums run over ascending tokens, then channels.
    """
    others = np.delete(keys, chosen, axis=1)
    count = np.float32(NUM_OTHERS)
    mean = np.add.accumulate(others, axis=1)[:, -1] / count
    distance = others - mean[:, None]
    squares = np.add.accumulate(distance * distance, axis=1)[:, -1]
    bands = squares.reshape(len(keys), NUM_BANDS, -1)
    band_sums: F32 = np.add.accumulate(bands, axis=2)[:, :, -1]
    spreads: F32 = (band_sums / np.float32(NUM_OTHERS * bands.shape[2])).astype(np.float32)
    rows = quantize_q8(np.concatenate([keys[:, chosen], mean[:, None]], axis=1))
    assert rows.scales is not None  # q8 rows have one scale each
    return Summary(codes=rows.values, scales=rows.scales[..., 0], spreads=spreads)


def record_logits(q: Rows, summary: Summary) -> F32:
    """Logits of every vector of every block: f32 ``[R, vectors, Nb]``; the mean's are raised.

    Parameters
    ----------
    q : Rows ``[R, D]``, q8
    """
    assert q.scales is not None
    num_blocks, vectors, head_dim = summary.codes.shape
    dots = int_dot(q.values, summary.codes.reshape(-1, head_dim))
    scaled = dots.reshape(len(dots), num_blocks, vectors) * (
        summary.scales[None] * q.scales[:, :, None]
    )
    out: F32 = np.ascontiguousarray(scaled.transpose(0, 2, 1))
    wide = q.values.astype(np.int32).reshape(len(dots), NUM_BANDS, -1)
    squares = (wide * wide).sum(axis=2).astype(np.float32)
    energy = SPREAD_GAIN * (q.scales * q.scales) * squares
    gain = summary.spreads[None, :, 0] * energy[:, None, 0]
    for band in range(1, NUM_BANDS):
        gain = gain + summary.spreads[None, :, band] * energy[:, None, band]
    out[:, NUM_ANCHORS] += gain
    return out


def block_masses(records: F32, recent: F32) -> tuple[F32, F32]:
    """Attention mass of each block, up to one factor per row.

    Parameters
    ----------
    records : f32 ``[R, vectors, N]`` of `record_logits`
    recent : f32 ``[R, 2, 32]``: logits of the two newest blocks, -inf where not visible

    Returns
    -------
    masses : f32 ``[R, N + 2]``, in units of ``exp(top)``
    top : f32 ``[R]``, the largest logit of the row
    """
    top = np.maximum(records.max(axis=(1, 2), initial=-np.inf), recent.max(axis=(1, 2)))
    weights = exp(records - top[:, None, None])
    mass = weights[:, 0]
    for anchor in range(1, NUM_ANCHORS):
        mass = mass + weights[:, anchor]
    mass = mass + np.float32(NUM_OTHERS) * weights[:, NUM_ANCHORS]
    newest = exp(recent - top[:, None, None]).sum(axis=2)
    return np.concatenate([mass, newest], axis=1).astype(np.float32), top.astype(np.float32)


def shares(masses: F32, block_size: int) -> F32:
    """Masses of blocks of 32 as shares of their row's sum, per selection block: ``[R, Ns]``."""
    total = np.add.accumulate(masses, axis=1)[:, -1:]
    starts = np.arange(0, masses.shape[1], block_size // BLOCK_SIZE)
    return np.add.reduceat(masses * (np.float32(1) / total), starts, axis=1)


def merge_shares(row_shares: F32, *, is_mean: bool) -> F32:
    """One share per block for rows that read the same: f32 ``[R, Ns]`` to ``[Ns]``.

    The largest: a block that one row needs is not voted down by the others. With a mass budget the
    mean, in row order, because it says what share of all their attention a block holds.
    """
    if is_mean:
        summed: F32 = np.add.accumulate(row_shares, axis=0)[-1] / np.float32(len(row_shares))
        return summed
    largest: F32 = row_shares.max(axis=0)
    return largest


# -- a segment ----------------------------------------------------------------------------------
def complete_index(segment: Segment, layer: int, q: Rows) -> None:
    """Write the records that a segment's rows complete; `q` is ``Rows [Tq, Hq, D]``, folded."""
    layout, index = segment.index_layout, segment.index
    if not isinstance(layout, AnchorLayout) or index is None:
        return
    first, last = segment.start // BLOCK_SIZE + 1, (segment.start + segment.q_len) // BLOCK_SIZE
    num_kv_heads = segment.pages.shape[2]
    group = q.values.shape[1] // num_kv_heads
    for tile in range(max(2, first), last + 1):
        row, block = tile * BLOCK_SIZE - 1 - segment.start, tile - 2
        pair = np.array([block, block + 1], dtype=np.int32)
        keys = [read_keys(segment, layer, head, pair) for head in range(num_kv_heads)]
        attended = [
            logits(q.take((slice(row, row + 1), slice(h * group, (h + 1) * group))).flat(), keys[h])
            for h in range(num_kv_heads)
        ]
        chosen = choose_anchors(received(np.concatenate(attended)))
        own = np.stack([key.floats()[:BLOCK_SIZE] for key in keys])
        _write_lane(index[layer, block // LANES], layout, block % LANES, summarize(own, chosen))


def fill_evenly(segment: Segment, layer: int) -> None:
    """Records of all full blocks with evenly spaced keys for anchors: for keys without history."""
    layout, index = segment.index_layout, segment.index
    assert isinstance(layout, AnchorLayout)
    assert index is not None
    chosen = np.arange(0, BLOCK_SIZE, BLOCK_SIZE // NUM_ANCHORS, dtype=np.int32)
    for block in range((segment.start + segment.q_len) // BLOCK_SIZE):
        pair = np.array([block], dtype=np.int32)
        heads = range(segment.pages.shape[2])
        keys = np.stack([read_keys(segment, layer, head, pair).floats() for head in heads])
        _write_lane(index[layer, block // LANES], layout, block % LANES, summarize(keys, chosen))


def segment_masses(
    segment: Segment, layer: int, kv_head: int, *, q: Rows, positions: I64
) -> tuple[F32, F32]:
    """Masses of the blocks up to the rows' own (see `block_masses`).

    Parameters
    ----------
    q : Rows ``[R, D]``, folded, all in one block
    positions : i64 ``[R]``
    """
    layout, index = segment.index_layout, segment.index
    assert isinstance(layout, AnchorLayout)
    assert index is not None  # check_segment saw to both
    own = int(positions[0]) // BLOCK_SIZE
    summary = _read_index(index[layer, :, kv_head], layout, own - 1)
    codes = q if q.scales is not None else quantize_q8(q.values)
    newest = np.array([own - 1, own], dtype=np.int32)
    recent = logits(q, read_keys(segment, layer, kv_head, newest))
    tokens = np.arange((own - 1) * BLOCK_SIZE, (own + 1) * BLOCK_SIZE)
    recent = np.where(tokens[None] <= positions[:, None], recent, np.float32(-np.inf))
    return block_masses(record_logits(codes, summary), recent.reshape(len(recent), 2, BLOCK_SIZE))


def _write_lane(records: U8, layout: AnchorLayout, lane: int, summary: Summary) -> None:
    """One block's records, one per KV head, into ``records [Hkv, record_bytes]``."""
    codes, scales, spreads = record_views(records, layout)
    chunks = summary.codes.reshape(len(records), layout.vectors, -1, 4)
    codes[:, :, :, lane] = (chunks.astype(np.int16) + U8_ZERO).astype(np.uint8)
    scales[:, :, lane] = summary.scales
    spreads[:, :, lane] = summary.spreads


def _read_index(records: U8, layout: AnchorLayout, num_blocks: int) -> Summary:
    codes, scales, spreads = record_views(records, layout)
    by_block = np.moveaxis(codes, -2, 1).reshape(-1, *codes.shape[1:3], 4)[:num_blocks]
    signed = (by_block.astype(np.int16) - U8_ZERO).astype(np.int8)
    return Summary(
        codes=signed.reshape(num_blocks, layout.vectors, layout.head_dim),
        scales=np.moveaxis(scales, -1, 1).reshape(-1, layout.vectors)[:num_blocks],
        spreads=np.moveaxis(spreads, -1, 1).reshape(-1, NUM_BANDS)[:num_blocks],
    )
