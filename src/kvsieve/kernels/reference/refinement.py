"""Selector ``anchors``, decode: before blocks are chosen, the promising ones get their exact mass.

An estimate from three vectors ranks blocks well, but may miss one that holds a single token the
query asks for. So the keys of the best blocks by estimate are read, and what these show of the
estimate's error corrects the other blocks. Source: docs/selection.md, section 4.
"""

from dataclasses import dataclass

import numpy as np

from kvsieve.kernels.backend import Segment, SparsePlan
from kvsieve.kernels.reference.anchors import merge_shares, segment_masses, shares
from kvsieve.kernels.reference.arithmetic import exp
from kvsieve.kernels.reference.logits import logits
from kvsieve.kernels.reference.pages import read_keys
from kvsieve.kernels.reference.quantize import Rows
from kvsieve.kernels.reference.selection import pick_even
from kvsieve.types import BLOCK_SIZE, F32, I32

MIN_REFINED = 64
"""Selection blocks that get their exact mass however small the budget."""

NUM_MARGIN = 16
"""Of the blocks refined, so many of the worst by estimate tell how wrong it is further down."""

MAX_CORRECTION = np.float32(16)
"""Most by which the blocks further down are scaled."""


@dataclass(frozen=True, kw_only=True)
class Refined:
    """What a decoded token's blocks hold of its attention, for query heads that choose together.

    shares  f32 ``[Ns]``, of selection blocks, merged; -inf for those that were not refined
    masses  f32 ``[H, Nb]``, of blocks of 32, in units of ``exp(top)``
    tops    f32 ``[H]``
    """

    shares: F32
    masses: F32
    tops: F32


def num_refined(k: int) -> int:
    """Selection blocks that get their exact mass under a budget of `k`, guards among them."""
    return max(MIN_REFINED, k + NUM_MARGIN)


def candidates(merged: F32, k: int) -> tuple[I32, I32]:
    """Selection blocks to be refined, guards first and then by share, and the margin among them.

    Parameters
    ----------
    merged : f32 ``[Ns]``, estimated shares

    Returns
    -------
    i32, ascending, both; ties go to the lower index
    """
    count = num_refined(k)
    chosen = pick_even(merged, count)
    return chosen, np.setdiff1d(chosen, pick_even(merged, count - NUM_MARGIN)).astype(np.int32)


def correct(
    masses: F32, tops: F32, exact_logits: F32, *, pages: I32, is_margin: F32
) -> tuple[F32, F32]:
    """Put exact masses in place of estimates, and scale those that stay.

    A row's scale is the quotient of exact and estimated mass over the margin, at most 16; 1 where
    nothing was estimated there.

    Parameters
    ----------
    masses : f32 ``[H, Nb]`` in units of ``exp(tops)``; the last two are exact already
    tops : f32 ``[H]``
    exact_logits : f32 ``[H, P, 32]``
    pages : i32 ``[P]``, blocks of 32 that these are of
    is_margin : f32 ``[P]``, 1 for blocks of the margin, else 0

    Returns
    -------
    masses, tops, of the same shapes
    """
    highest = np.maximum(tops, exact_logits.max(axis=(1, 2), initial=-np.inf)).astype(np.float32)
    found = masses * exp(tops - highest)[:, None]
    exact = exp(exact_logits - highest[:, None, None]).sum(axis=2).astype(np.float32)
    estimated = (found[:, pages] * is_margin).sum(axis=1)
    true = (exact * is_margin).sum(axis=1)
    quotient = np.divide(true, estimated, out=np.ones_like(true), where=estimated > 0)
    scale = np.minimum(quotient, MAX_CORRECTION)
    scaled = found * scale[:, None]
    scaled[:, -2:] = found[:, -2:]
    scaled[:, pages] = exact
    return scaled, highest


def refine(segment: Segment, layer: int, plan: SparsePlan, *, q: Rows, heads: range) -> Refined:
    """Shares and masses for query heads of one KV head that choose together.

    Parameters
    ----------
    q : Rows ``[1, Hq, D]``, folded
    """
    kv_head = heads.start * int(segment.pages.shape[2]) // q.values.shape[1]
    positions = np.array([segment.start], np.int64)
    own = [q.take((slice(0, 1), slice(head, head + 1))).flat() for head in heads]
    found = [segment_masses(segment, layer, kv_head, q=row, positions=positions) for row in own]
    masses, tops = (np.concatenate(part) for part in zip(*found, strict=True))
    is_mean = plan.mass > 0
    estimated = merge_shares(shares(masses, plan.block_size), is_mean=is_mean)
    chosen, margin = candidates(estimated, plan.k)
    num_indexed = masses.shape[1] - 2
    each = np.arange(num_indexed, dtype=np.int32)
    pages = each[np.isin(each * BLOCK_SIZE // plan.block_size, chosen)]
    if len(pages):
        keys = read_keys(segment, layer, kv_head, pages)
        exact = np.concatenate([logits(row, keys) for row in own])
        in_margin = np.isin(pages * BLOCK_SIZE // plan.block_size, margin).astype(np.float32)
        masses, tops = correct(
            masses, tops, exact.reshape(len(own), -1, BLOCK_SIZE), pages=pages, is_margin=in_margin
        )
    merged = merge_shares(shares(masses, plan.block_size), is_mean=is_mean)
    left_out = np.ones(len(merged), bool)
    left_out[chosen] = False
    merged[left_out] = -np.inf
    return Refined(shares=merged, masses=masses, tops=tops)
