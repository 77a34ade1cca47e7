"""Selection for a segment of a cache: read the sampled keys, score, choose, write the lists.

`selection` holds the rules; this module feeds them from pages. Source: docs/selection.md, 2 to 6.
"""

from dataclasses import dataclass
from typing import get_args

import numpy as np

from kvsieve.errors import ConfigError, ShapeError
from kvsieve.kernels.backend import BlockLists, Segment, SparsePlan
from kvsieve.kernels.layout import AnchorLayout, VectorRule
from kvsieve.kernels.reference.anchors import (
    complete_index,
    merge_shares,
    segment_masses,
    shares,
)
from kvsieve.kernels.reference.attention import listed_blocks
from kvsieve.kernels.reference.controls import random_scores, true_masses
from kvsieve.kernels.reference.logits import fold_queries, logits
from kvsieve.kernels.reference.pages import block_positions, read_keys, tiles
from kvsieve.kernels.reference.quantize import Rows
from kvsieve.kernels.reference.refinement import Refined, refine
from kvsieve.kernels.reference.selection import (
    block_lists,
    causal_blocks,
    count_blocks,
    expand_blocks,
    importance_block_sums,
    merge_group,
    merge_tile,
    pick_even,
    pick_mass,
    pick_prefill,
    pick_probe,
    pick_window,
    probe_positions,
    score_probes,
)
from kvsieve.kernels.reference.two_levels import coarse_positions, keep_candidates
from kvsieve.kernels.reference.vectors import complete_vectors, segment_scores
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

    @property
    def group_size(self) -> int:
        return int(self.q.values.shape[1]) // self.num_kv_heads

    def scores(self, kv_head: int, rows: slice, *, num_tokens: int) -> F32:
        """Scores of the blocks of the first `num_tokens` tokens: f32 ``[rows * G, Nb]``."""
        if self.plan.selector in get_args(VectorRule):
            return segment_scores(
                self.segment,
                self.layer,
                kv_head,
                q=self._group_queries(kv_head, rows),
                num_tokens=num_tokens,
                block_size=self.plan.block_size,
            )
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
        return logits(self._group_queries(kv_head, rows), keys)

    def _group_queries(self, kv_head: int, rows: slice) -> Rows:
        """Queries of the heads that read a KV head: Rows ``[rows * G, D]``."""
        group = self.group_size
        heads = slice(kv_head * group, (kv_head + 1) * group)
        return self.q.take((rows, heads)).flat()

    def shares(self, kv_head: int, rows: slice) -> F32:
        """Estimated shares of rows of one block: f32 ``[G * rows, Ns]``, head by head."""
        group = range(kv_head * self.group_size, (kv_head + 1) * self.group_size)
        return shares(self._masses(group, rows)[0], self.plan.block_size)

    def _masses(self, heads: range, rows: slice) -> tuple[F32, F32]:
        """Masses per block of 32 and their units (`anchors.block_masses`), head by head."""
        kv_head = heads.start // self.group_size
        positions = self.segment.start + np.arange(rows.start, rows.stop, dtype=np.int64)
        # The only block of a short context counts exactly, as the two newest of any do.
        is_true = self.plan.selector == "oracle" or positions[0] < BLOCK_SIZE
        masses_of = true_masses if is_true else segment_masses
        found = [
            masses_of(
                self.segment,
                self.layer,
                kv_head,
                q=self.q.take((rows, slice(head, head + 1))).flat(),
                positions=positions,
            )
            for head in heads
        ]
        masses, tops = zip(*found, strict=True)
        return np.concatenate(masses), np.concatenate(tops)

    def refined(self) -> list[Refined]:
        """Masses of a decoded token, one result per list."""
        step = self.group_size if self.plan.share == "group" else 1
        lists = [range(head, head + step) for head in range(0, self.q.values.shape[1], step)]
        if self.plan.selector == "oracle":
            return [self._true(heads) for heads in lists]
        return [
            refine(self.segment, self.layer, self.plan, q=self.q, heads=heads) for heads in lists
        ]

    def _true(self, heads: range) -> Refined:
        """What needs no refinement."""
        masses, tops = self._masses(heads, slice(0, 1))
        rows = shares(masses, self.plan.block_size)
        merged = merge_shares(rows, is_mean=self.plan.mass > 0)
        return Refined(shares=merged, masses=masses, tops=tops)

    def decode_scores(self) -> F32:
        """Scores of the only row, per query head: f32 ``[Hq, Nb]``."""
        num_tokens = self.segment.start + 1
        kv_heads = range(self.num_kv_heads)
        if self.plan.by_shares:
            return np.concatenate([self.shares(head, slice(0, 1)) for head in kv_heads])
        if self.plan.selector == "random":
            q_heads = range(self.q.values.shape[1])
            return np.stack([self.drawn(head, num_tokens - 1) for head in q_heads])
        scores = [self.scores(head, slice(0, 1), num_tokens=num_tokens) for head in kv_heads]
        return np.concatenate(scores)

    def drawn(self, head: int, position: int) -> F32:
        """Random numbers for the blocks up to a position's own, drawn for a query head."""
        return random_scores(
            seed=self.plan.seed,
            layer=self.layer,
            head=head,
            position=position,
            num_blocks=count_blocks(position + 1, self.plan.block_size),
        )

    def select_decode(self) -> BlockLists:
        """One list per query head, or per KV head with ``share="group"``."""
        plan, num_tokens = self.plan, self.segment.start + 1
        num_blocks = count_blocks(num_tokens, plan.block_size)
        scores = self._merged_decode_scores(num_tokens, num_blocks)
        sums: I64 | None = None
        if self.segment.importance is not None:
            received = self.segment.importance[self.layer, :num_tokens]
            sums = importance_block_sums(received, plan.block_size)
        rows = []
        for row in scores:
            if plan.selector == "probe":
                chosen = pick_probe(row, sums, plan.k)
            elif plan.selector == "window":
                chosen = pick_window(num_blocks, plan.k)
            elif plan.mass:
                chosen = self._pick_mass(row, (num_blocks - 1, 0, num_blocks - 2))
            else:
                chosen = pick_even(row, plan.k)
            rows.append(self._expanded(chosen, num_blocks=count_blocks(num_tokens)))
        return block_lists(rows, num_heads=len(rows))

    def _merged_decode_scores(self, num_tokens: int, num_blocks: int) -> F32:
        """One row per list."""
        plan = self.plan
        if plan.selector == "window":  # nothing to score
            num_lists = self.num_kv_heads if plan.share == "group" else self.q.values.shape[1]
            return np.zeros((num_lists, num_blocks), np.float32)
        if plan.by_shares:
            return np.stack([one.shares for one in self.refined()])
        num_full = num_tokens // plan.block_size
        scores = self.decode_scores()
        # The heads that choose together: a group, or each on its own.
        lists = self.num_kv_heads if plan.share == "group" else len(scores)
        scores = scores.reshape(lists, -1, scores.shape[1])
        if plan.selector == "random":  # for the first head of a group
            return scores[:, 0]
        if plan.selector == "even" and num_full:
            coarse = [self.coarse(head, num_full=num_full) for head in range(self.num_kv_heads)]
            scores = keep_candidates(
                scores, np.concatenate(coarse).reshape(lists, -1, num_full), plan.k
            )
        return merge_group(scores, num_full=num_full) if plan.share == "group" else scores[:, 0]

    def _pick_mass(self, row: F32, guards: tuple[int, ...]) -> I32:
        plan = self.plan
        return pick_mass(row, mass=plan.mass, k_min=plan.k_min, k=plan.k, guards=guards)

    def select_prefill(self) -> BlockLists:
        """One list per (KV head, tile), shared by the tile's rows and the group's heads."""
        rows = [
            self._select_tile(kv_head, tile, tile_rows)
            for kv_head in range(self.num_kv_heads)
            for tile, tile_rows in tiles(self.segment)
        ]
        return block_lists(rows, num_heads=self.num_kv_heads)

    def _select_tile(self, kv_head: int, tile: int, rows: slice) -> I32:
        plan = self.plan
        own = tile * BLOCK_SIZE // plan.block_size
        if not plan.tile_is_sparse(tile):
            return causal_blocks(tile)
        if plan.selector == "window":
            chosen = pick_window(own + 1, plan.k)
        elif plan.selector == "random":
            first = tile * BLOCK_SIZE
            chosen = pick_prefill(self.drawn(kv_head * self.group_size, first)[:own], plan.k)
        elif plan.by_shares:
            merged = merge_shares(self.shares(kv_head, rows), is_mean=plan.mass > 0)
            if plan.mass:
                chosen = self._pick_mass(merged, (own, own - 1, 0))
            else:
                chosen = pick_prefill(merged[:own], plan.k)
        else:
            scores = self.scores(kv_head, rows, num_tokens=own * plan.block_size)
            chosen = pick_prefill(merge_tile(scores), plan.k)
        return self._expanded(chosen, num_blocks=tile + 1)

    def _expanded(self, chosen: I32, *, num_blocks: int) -> I32:
        return expand_blocks(chosen, block_size=self.plan.block_size, num_blocks=num_blocks)


def score_blocks(segment: Segment, layer: int, q: F32, *, scale: float) -> F32:
    """Scores of a decoded token, its own key included: by the selector's rule; with anchors shares
    by estimate alone.

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
    scorer = _Scorer(segment=segment, layer=layer, plan=segment.sparse.of_layer(layer), q=q_rows)
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
    q_rows = fold_queries(q, segment.layout.k_type, scale=scale)
    complete_index(segment, layer, q_rows)
    complete_vectors(segment, layer)
    if layer in plan.exact_layers:
        return None
    plan = plan.of_layer(layer)
    if segment.is_prefill:
        is_sparse = any(plan.tile_is_sparse(tile) for tile, _ in tiles(segment))
    else:
        _require_one_row("select", segment)
        is_sparse = plan.decode_is_sparse(segment.start + 1)
    if not is_sparse:
        return None
    scorer = _Scorer(segment=segment, layer=layer, plan=plan, q=q_rows)
    return scorer.select_prefill() if segment.is_prefill else scorer.select_decode()


def choose(segment: Segment, layer: int, q: F32, *, scale: float) -> BlockLists | None:
    """`select` of a step on its way through the layers: the index grows in exact steps too."""
    if segment.sparse is None:
        if isinstance(segment.index_layout, AnchorLayout):
            complete_index(segment, layer, fold_queries(q, segment.layout.k_type, scale=scale))
        complete_vectors(segment, layer)
    return select(segment, layer, q, scale=scale)


def kept_mass(
    segment: Segment, layer: int, q: F32, *, scale: float, lists: BlockLists | None
) -> F32 | None:
    """Estimated share of the attention on the listed blocks, per query head: f32 ``[Hq]``.

    What is listed counts exactly, what is not by its mass. None for what does not estimate: prompt
    tiles, and selectors without masses. 1 where everything is read.
    """
    plan = segment.sparse
    if plan is None or segment.is_prefill or not plan.by_shares:
        return None
    num_q_heads = q.shape[1]
    if lists is None:
        return np.ones(num_q_heads, np.float32)
    q_rows = fold_queries(q, segment.layout.k_type, scale=scale)
    scorer = _Scorer(segment=segment, layer=layer, plan=plan.of_layer(layer), q=q_rows)
    found = scorer.refined()
    masses = np.concatenate([one.masses for one in found])
    tops = np.concatenate([one.tops for one in found])
    kept = np.empty(num_q_heads, np.float32)
    for head in range(num_q_heads):
        own = segment.start // BLOCK_SIZE
        blocks = listed_blocks(lists, head * lists.num_heads // num_q_heads, own, segment)
        kv_head = head * scorer.num_kv_heads // num_q_heads
        keys = read_keys(segment, layer, kv_head, blocks)
        row = logits(q_rows.take((slice(0, 1), slice(head, head + 1))).flat(), keys)[0]
        visible = block_positions(blocks) <= segment.start
        read = np.exp(row[visible].astype(np.float64) - tops[head]).sum()
        skipped = np.delete(masses[head], blocks).sum(dtype=np.float64)
        kept[head] = read / (read + skipped)
    return kept


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
