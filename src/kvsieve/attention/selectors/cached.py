"""Selectors that are the kernels' own: run on a cache of one layer, made of the arrays given."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.inputs import AttentionShape, attention_shape
from kvsieve.attention.selectors.base import Selector
from kvsieve.kernels.backend import BlockLists, Segment, SelectorKind, SparsePlan
from kvsieve.kernels.layout import GROUP, AnchorLayout, PageLayout, summary_layout
from kvsieve.kernels.reference.anchors import complete_index, fill_evenly
from kvsieve.kernels.reference.logits import fold_queries
from kvsieve.kernels.reference.pages import append
from kvsieve.kernels.reference.segment_selection import score_blocks, select
from kvsieve.kernels.reference.vectors import complete_vectors
from kvsieve.types import BLOCK_SIZE, F32, I64


@dataclass(frozen=True, kw_only=True)
class CachedSelector(Selector):
    """A rule that the kernels have, by its name there: a subclass adds that and its settings.

    What the rule keeps of a block is made by the kernels too, so that plain arrays and the engine
    choose alike.
    """

    kind: ClassVar[SelectorKind]

    def score(self, q: F32, k: F32, *, scale: float) -> F32:
        """See `Selector.score`. The rows are the last positions of `k`."""
        rows = []
        for row in range(q.shape[1]):
            end = k.shape[1] - q.shape[1] + row + 1
            segment, folded = self._segment(q[:, : row + 1], k[:, :end], scale=scale, q_len=1)
            rows.append(score_blocks(segment, 0, folded[-1:], scale=1.0))
        num_blocks = rows[-1].shape[1]
        return np.stack([np.pad(r, ((0, 0), (0, num_blocks - r.shape[1]))) for r in rows], axis=1)

    def select_decode(
        self, q: F32, k: F32, *, scale: float, importance: I64 | None = None
    ) -> BlockMask:
        """See `Selector.select_decode`; `importance` plays no part."""
        segment, folded = self._segment(q, k, scale=scale, q_len=1)
        shape = attention_shape("select_decode", q, k)
        return _mask(select(segment, 0, folded, scale=1.0), shape)

    def select_prefill(
        self, q: F32, k: F32, *, scale: float, exact_from_tile: int | None = None
    ) -> BlockMask:
        """See `Selector.select_prefill`."""
        shape = attention_shape("select_prefill", q, k)
        num_blocks = -(-shape.kv_len // BLOCK_SIZE)
        exact_from = num_blocks if exact_from_tile is None else exact_from_tile
        segment, folded = self._segment(q, k, scale=scale, q_len=shape.q_len, exact_from=exact_from)
        return _mask(select(segment, 0, folded, scale=1.0), shape)

    def _segment(
        self, q: F32, k: F32, *, scale: float, q_len: int, exact_from: int | None = None
    ) -> tuple[Segment, F32]:
        """A cache of one layer with the keys and a complete index; the queries ``[T, Hq, D]``.

        These are folded. The last `q_len` rows are the segment's; a prompt's if `exact_from` is
        given.
        """
        rows, keys = (_as_token_rows(array) for array in (q * np.float32(scale), k))
        kv_len, num_kv_heads, head_dim = keys.shape
        layout = PageLayout(k_type="f32", v_type="f32", head_dim=head_dim)
        index_layout = summary_layout(self.kind, head_dim=head_dim)
        num_blocks = -(-kv_len // BLOCK_SIZE)
        pages = np.zeros((1, num_blocks, num_kv_heads, layout.page_bytes), np.uint8)
        index = None
        if index_layout is not None:
            groups = index_layout.num_groups(kv_len)
            index = np.zeros((1, groups, num_kv_heads, index_layout.record_bytes), np.uint8)

        def segment(length: int) -> Segment:
            return Segment(
                start=kv_len - length,
                q_len=length,
                is_prefill=exact_from is not None,
                layout=layout,
                pages=pages,
                block_table=np.arange(num_blocks, dtype=np.int32),
                sparse=self._plan(exact_from),
                index_layout=index_layout,
                index=index,
            )

        append(segment(kv_len), 0, keys, keys)
        complete_vectors(segment(kv_len), 0)
        if isinstance(index_layout, AnchorLayout):
            fill_evenly(segment(kv_len), 0)
            complete_index(segment(len(rows)), 0, fold_queries(rows, "f32", scale=1.0))
        return segment(q_len), rows

    def _plan(self, exact_from: int | None) -> SparsePlan:
        """A subclass with settings of its own replaces them here."""
        return SparsePlan(
            selector=self.kind,
            k=self.k,
            block_size=self.block_size,
            num_probes=1,
            share=self.share,
            exact_from_tile=exact_from or 0,
        )


def _as_token_rows(array: F32) -> F32:
    """``[heads, T, D]`` as ``[T, heads, D']``, D filled up with zeros to what a page holds."""
    filled = np.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % GROUP)))
    return np.ascontiguousarray(filled.transpose(1, 0, 2))


def _mask(lists: BlockLists | None, shape: AttentionShape) -> BlockMask:
    if lists is None:
        return BlockMask.full(
            q_len=shape.q_len, kv_len=shape.kv_len, num_kv_heads=shape.num_kv_heads
        )
    return BlockMask(
        indptr=lists.indptr,
        indices=lists.indices,
        num_kv_heads=shape.num_kv_heads,
        num_tiles=lists.num_tiles,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        lists_per_kv_head=lists.num_heads // shape.num_kv_heads,
    )
