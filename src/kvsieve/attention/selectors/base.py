"""What all selectors share: gate, budget, guards, choice of the best blocks, packing."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.config import Share
from kvsieve.attention.inputs import AttentionShape, attention_shape
from kvsieve.kernels.backend import BlockLists, SparsePlan
from kvsieve.kernels.reference.selection import (
    causal_blocks,
    count_blocks,
    decode_is_sparse,
    expand_blocks,
    importance_block_sums,
    merge_group,
    merge_tile,
    pick_even,
    pick_prefill,
    probe_scores,
    tile_is_sparse,
)
from kvsieve.kernels.reference.two_levels import keep_candidates
from kvsieve.types import BLOCK_SIZE, F32, I32, I64


@dataclass(frozen=True, kw_only=True)
class Selector(ABC):
    """A rule for choosing blocks. A new one overrides `score`, and `pick` if it has no guards; then
    ``SparseAttention(rule=...)`` runs it in the engine.

    k           budget in selection blocks, everything read included
    block_size  tokens per selection block, 32 or a multiple of it
    share       decode: one selection per query ``head`` or per ``group``; prefill: always per group
    """

    k: int = 32
    block_size: int = BLOCK_SIZE
    share: Share = "head"

    @abstractmethod
    def score(self, q: F32, k: F32, *, scale: float) -> F32:
        """How much each query wants each selection block.

        Parameters
        ----------
        q : f32 ``[Hq, R, D]``, R query rows
        k : f32 ``[Hkv, n, D]``, the keys of positions 0 to n - 1, all visible to every row
        scale : factor of the logits

        Returns
        -------
        f32 ``[Hq, R, ceil(n / block_size)]``, higher is better. Only comparisons within a row
        count, except under `share` ``group`` and in prefill, where distances from the row's best
        block are compared between rows.
        """

    def under(self, *, k: int, block_size: int, share: Share) -> "Selector":
        """The same rule under another budget."""
        return replace(self, k=k, block_size=block_size, share=share)

    def block_lists(
        self, q: F32, k: F32, *, plan: SparsePlan, is_prefill: bool, scale: float
    ) -> BlockLists | None:
        """See `BlockRule`: how the engine asks for a selection; budget and gate are the plan's."""
        own = self.under(k=plan.k, block_size=plan.block_size, share=plan.share)
        if is_prefill:
            mask = own.select_prefill(q, k, scale=scale, exact_from_tile=plan.exact_from_tile)
        else:
            mask = own.select_decode(q, k, scale=scale)
        return mask.to_block_lists()

    def coarse(self, q: F32, k: F32, *, scale: float) -> F32 | None:
        """What the first of two levels compares, or None: every block gets its full score.

        Parameters
        ----------
        q : f32 ``[Hq, 1, D]``
        k : f32 ``[Hkv, n, D]``, the keys of full selection blocks alone

        Returns
        -------
        f32 ``[Hq, n / block_size]`` or None
        """
        return None

    def pick(self, scores: F32, importance_sums: I64 | None) -> I32:
        """Blocks of one decoded query, ascending: guards, then the best scores.

        The guards are the last block, block 0 and the one before the last, in this order of
        precedence. Ties go to the lower index. docs/selection.md, section 4.

        Parameters
        ----------
        scores : f32 ``[Nb]``
        importance_sums : i64 ``[Nb]`` or None; not used by this rule
        """
        return pick_even(scores, self.k)

    def pick_tile(self, scores: F32) -> I32:
        """Blocks of a prompt tile, ascending: its own, the one before it, block 0, then by score.

        Parameters
        ----------
        scores : f32 ``[J]``, merged, of the selection blocks before the tile's own
        """
        return pick_prefill(scores, self.k)

    def select_decode(
        self, q: F32, k: F32, *, scale: float, importance: I64 | None = None
    ) -> BlockMask:
        """Blocks of one decoded token, the last of `k`; all blocks where the gate says exact.

        Parameters
        ----------
        q : f32 ``[Hq, 1, D]``
        k : f32 ``[Hkv, n, D]``
        importance : i64 ``[n]`` in units of 2**-24, or None
        """
        shape = attention_shape("select_decode", q, k)
        if not decode_is_sparse(shape.kv_len, self.k, block_size=self.block_size):
            return _exact(shape)
        shared = self.share == "group"
        num_full = shape.kv_len // self.block_size
        lists = shape.num_kv_heads if shared else shape.num_kv_heads * shape.group_size
        scores = self.score(q, k, scale=scale)[:, 0].reshape(
            lists, -1, count_blocks(shape.kv_len, self.block_size)
        )
        if num_full:
            coarse = self.coarse(q, k[:, : num_full * self.block_size], scale=scale)
            if coarse is not None:
                scores = keep_candidates(scores, coarse.reshape(lists, -1, num_full), self.k)
        scores = merge_group(scores, num_full=num_full) if shared else scores[:, 0]
        lists_per_kv_head = lists // shape.num_kv_heads
        sums = None
        if importance is not None:
            sums = importance_block_sums(importance, self.block_size)
        num_blocks = count_blocks(shape.kv_len)
        rows = [self._expanded(self.pick(row, sums), num_blocks) for row in scores]
        return _packed(rows, shape, lists_per_kv_head)

    def select_prefill(
        self, q: F32, k: F32, *, scale: float, exact_from_tile: int | None = None
    ) -> BlockMask:
        """Blocks of each tile of prompt tokens, one list per (KV head, tile).

        A tile is scored against the full selection blocks before its own and nothing else, so a
        future block can neither be chosen nor push a past one out. The score of a block is
        merged over all rows of the tile and the heads of the group.

        Parameters
        ----------
        q : f32 ``[Hq, Tq, D]``, starting at a multiple of 32
        k : f32 ``[Hkv, Tkv, D]``
        exact_from_tile : tiles from this block on read everything; None: no exact tail
        """
        shape = attention_shape("select_prefill", q, k)
        num_blocks = count_blocks(shape.kv_len)
        exact_from = num_blocks if exact_from_tile is None else exact_from_tile
        per_tile = [
            self._select_tile(tile, q, k, scale=scale, exact_from=exact_from)
            for tile in range(shape.start // BLOCK_SIZE, num_blocks)
        ]
        return _packed(
            [tile[head] for head in range(shape.num_kv_heads) for tile in per_tile], shape, 1
        )

    def _select_tile(
        self, tile: int, q: F32, k: F32, *, scale: float, exact_from: int
    ) -> list[I32]:
        """One list per KV head for one tile."""
        num_kv_heads = k.shape[0]
        if not tile_is_sparse(tile, self.k, exact_from_tile=exact_from, block_size=self.block_size):
            return [causal_blocks(tile)] * num_kv_heads
        start = k.shape[1] - q.shape[1]
        rows = q[:, max(0, tile * BLOCK_SIZE - start) : (tile + 1) * BLOCK_SIZE - start]
        own = tile * BLOCK_SIZE // self.block_size
        scores = self.score(rows, k[:, : own * self.block_size], scale=scale)
        merged = merge_tile(scores.reshape(num_kv_heads, -1, own))
        return [self._expanded(self.pick_tile(row), tile + 1) for row in merged]

    def _expanded(self, selected: I32, num_blocks: int) -> I32:
        return expand_blocks(selected, block_size=self.block_size, num_blocks=num_blocks)


def strided_scores(q: F32, k: F32, *, scale: float, block_size: int, num_probes: int) -> F32:
    """Largest logit of evenly spaced keys of each block, ``f32 [Hq, R, Nb]``; see `Selector.score`.

    A block over ``[p0, p1)`` is sampled at ``p0, p0 + step, ... < p1`` with
    ``step = max(1, (p1 - p0) // num_probes)``. docs/selection.md, section 3, step 1.
    """
    num_q_heads, num_rows, head_dim = q.shape
    flat = np.ascontiguousarray(q).reshape(num_q_heads * num_rows, head_dim)
    scores = probe_scores(flat, k, scale=scale, block_size=block_size, num_probes=num_probes)
    return scores.reshape(num_q_heads, num_rows, -1)


def _exact(shape: AttentionShape) -> BlockMask:
    return BlockMask.full(q_len=shape.q_len, kv_len=shape.kv_len, num_kv_heads=shape.num_kv_heads)


def _packed(rows: list[I32], shape: AttentionShape, lists_per_kv_head: int) -> BlockMask:
    return BlockMask(
        indptr=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        indices=np.concatenate(rows),
        num_kv_heads=shape.num_kv_heads,
        num_tiles=len(rows) // (shape.num_kv_heads * lists_per_kv_head),
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        lists_per_kv_head=lists_per_kv_head,
    )
