"""Selection for a segment of a cache: read the sampled keys, score, choose, write the lists.

`selection` holds the rules; this module feeds them from pages. Source: docs/selection.md, 2 to 6.
"""

from dataclasses import dataclass

import numpy as np

from kvsieve.errors import ConfigError, ShapeError
from kvsieve.kernels.backend import BlockLists, Segment, SparsePlan
from kvsieve.kernels.reference.attention import listed_blocks
from kvsieve.kernels.reference.logits import fold_queries, logits
from kvsieve.kernels.reference.pages import read_keys, tiles
from kvsieve.kernels.reference.quantize import Rows
from kvsieve.kernels.reference.selection import (
    block_lists,
    causal_blocks,
    count_blocks,
    expand_blocks,
    importance_block_sums,
    merge_group,
    merge_tile,
    pick_even,
    pick_prefill,
    pick_probe,
    probe_positions,
    score_probes,
)
from kvsieve.kernels.reference.two_levels import coarse_positions, keep_candidates
from kvsieve.types import BLOCK_SIZE, F32, I32, I64


@dataclass(frozen=True, kw_only=True)
class _Scorer:
    """Scores the blocks of one layer of a segment; `q` is ``Rows [Tq, Hq, D]``, already folded."""

    segment: Segment
    layer: int
    plan: SparsePlan
    q: Rows

    @property
    def num_kv_heads(self) -> int:
        return int(self.segment.pages.shape[2])

    def scores(self, kv_head: int, rows: slice, *, num_tokens: int) -> F32:
        """Scores of the blocks of the first `num_tokens` tokens: f32 ``[rows * G, Nb]``."""
        positions, offsets = probe_positions(
            num_tokens, block_size=self.plan.block_size, num_probes=self.plan.num_probes
        )
        return score_probes(self._logits(kv_head, rows, positions), offsets)

    def coarse(self, kv_head: int, *, num_full: int) -> F32:
        """Coarse scores of a decoded token: f32 ``[G, num_full]``."""
        positions = coarse_positions(
            num_full, block_size=self.plan.block_size, num_probes=self.plan.num_probes
        )
        found = self._logits(kv_head, slice(0, 1), positions.ravel())
        best: F32 = found.reshape(len(found), *positions.shape).max(axis=-1)
        return best

    def _logits(self, kv_head: int, rows: slice, positions: I64) -> F32:
        """Logits of the group's heads: f32 ``[rows * G, positions]``."""
        blocks = np.arange(count_blocks(int(positions[-1]) + 1), dtype=np.int32)
        keys = read_keys(self.segment, self.layer, kv_head, blocks).take(positions)
        group = self.q.values.shape[1] // self.num_kv_heads
        heads = slice(kv_head * group, (kv_head + 1) * group)
        return logits(self.q.take((rows, heads)).flat(), keys)

    def decode_scores(self) -> F32:
        """Scores of the only row, per query head: f32 ``[Hq, Nb]``."""
        num_tokens = self.segment.start + 1
        kv_heads = range(self.num_kv_heads)
        scores = [self.scores(head, slice(0, 1), num_tokens=num_tokens) for head in kv_heads]
        return np.concatenate(scores)

    def select_decode(self) -> BlockLists:
        """One list per query head, or per KV head with ``share="group"``."""
        plan, num_tokens = self.plan, self.segment.start + 1
        num_full = num_tokens // plan.block_size
        scores = self.decode_scores()
        # The heads that choose together: a group, or each on its own.
        lists = self.num_kv_heads if plan.share == "group" else len(scores)
        scores = scores.reshape(lists, -1, scores.shape[1])
        if plan.selector == "even" and num_full:
            coarse = [self.coarse(head, num_full=num_full) for head in range(self.num_kv_heads)]
            scores = keep_candidates(
                scores, np.concatenate(coarse).reshape(lists, -1, num_full), plan.k
            )
        scores = merge_group(scores, num_full=num_full) if plan.share == "group" else scores[:, 0]
        sums: I64 | None = None
        if self.segment.importance is not None:
            received = self.segment.importance[self.layer, :num_tokens]
            sums = importance_block_sums(received, plan.block_size)
        rows = []
        for row in scores:
            if plan.selector == "probe":
                chosen = pick_probe(row, sums, plan.k)
            else:
                chosen = pick_even(row, plan.k)
            rows.append(self._expanded(chosen, num_blocks=count_blocks(num_tokens)))
        return block_lists(rows, num_heads=len(rows))

    def select_prefill(self) -> BlockLists:
        """One list per (KV head, tile), shared by the tile's rows and the group's heads."""
        rows = [
            self._select_tile(kv_head, tile, tile_rows)
            for kv_head in range(self.num_kv_heads)
            for tile, tile_rows in tiles(self.segment)
        ]
        return block_lists(rows, num_heads=self.num_kv_heads)

    def _select_tile(self, kv_head: int, tile: int, rows: slice) -> I32:
        own = tile * BLOCK_SIZE // self.plan.block_size
        if not self.plan.tile_is_sparse(tile):
            return causal_blocks(tile)
        scores = self.scores(kv_head, rows, num_tokens=own * self.plan.block_size)
        chosen = pick_prefill(merge_tile(scores), self.plan.k)
        return self._expanded(chosen, num_blocks=tile + 1)

    def _expanded(self, chosen: I32, *, num_blocks: int) -> I32:
        return expand_blocks(chosen, block_size=self.plan.block_size, num_blocks=num_blocks)


def score_blocks(segment: Segment, layer: int, q: F32, *, scale: float) -> F32:
    """Probe scores of a decoded token, its own key included.

    Parameters
    ----------
    q : f32 ``[1, Hq, D]``

    Returns
    -------
    f32 ``[Hq, Nb]`` over selection blocks; the last one may be open

    Raises
    ------
    ShapeError
        The segment has more than one row: prompt tiles have merged scores only.
    ConfigError
        The segment has no sparse plan.
    """
    if segment.sparse is None:
        raise ConfigError("[score_blocks] segment.sparse: expected a SparsePlan, got None")
    _require_one_row("score_blocks", segment)
    q_rows = fold_queries(q, segment.layout.k_type, scale=scale)
    scorer = _Scorer(segment=segment, layer=layer, plan=segment.sparse, q=q_rows)
    return scorer.decode_scores()


def select(segment: Segment, layer: int, q: F32, *, scale: float) -> BlockLists | None:
    """Blocks that each row may read; None where the gate says exact for the whole segment.

    Parameters
    ----------
    q : f32 ``[Tq, Hq, D]``; one row in decode

    Returns
    -------
    Lists of blocks of 32. Decode: per query head with ``share="head"``, per KV head with ``group``.
    Prefill: per KV head and tile; an exact tile lists blocks 0 to its own. Where a segment starts
    inside a tile, the tile's selection is made by the rows it has.

    Raises
    ------
    ShapeError
        A segment that is not prefill has more than one row.
    """
    plan = segment.sparse
    if plan is None:
        return None
    if segment.is_prefill:
        is_sparse = any(plan.tile_is_sparse(tile) for tile, _ in tiles(segment))
    else:
        _require_one_row("select", segment)
        is_sparse = plan.decode_is_sparse(segment.start + 1)
    if not is_sparse:
        return None
    q_rows = fold_queries(q, segment.layout.k_type, scale=scale)
    scorer = _Scorer(segment=segment, layer=layer, plan=plan, q=q_rows)
    return scorer.select_prefill() if segment.is_prefill else scorer.select_decode()


def _require_one_row(function: str, segment: Segment) -> None:
    if segment.q_len != 1:
        raise ShapeError(f"[{function}] q: expected one decoded token, got {segment.q_len} rows")


def count_pairs(segment: Segment, lists: BlockLists | None, *, window: int = 0) -> tuple[int, int]:
    """(query, block) pairs that the lists read, and that exact attention would read.

    A pair is counted once per KV head, over the union of its query heads' lists. With a window,
    exact attention reads the window's blocks.
    """
    num_kv_heads = segment.pages.shape[2]
    attended = causal = 0
    for tile, rows in tiles(segment):
        num_rows = rows.stop - rows.start
        exact = num_rows * len(causal_blocks(tile, window=window)) * num_kv_heads
        causal += exact
        if lists is None:
            attended += exact
            continue
        sharing = lists.num_heads // num_kv_heads
        for kv_head in range(num_kv_heads):
            heads = range(kv_head * sharing, (kv_head + 1) * sharing)
            union = {int(b) for head in heads for b in listed_blocks(lists, head, tile, segment)}
            attended += num_rows * len(union)
    return attended, causal
