"""One layer's keys and values for every row of a batch: written to pages, read by the kernels.

Nothing here knows of PyTorch: arrays go in and come out, as the kernels take them.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.attention.dense import dense_attention
from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache, blocks_for
from kvsieve.engine.plan import selector_index, sparse_plan
from kvsieve.errors import ShapeError
from kvsieve.kernels.backend import Backend, BlockLists, Segment, SparsePlan
from kvsieve.kernels.layout import PageLayout
from kvsieve.kernels.reference.segment_selection import kept_mass
from kvsieve.types import F32, Bool, CacheType

_FIRST_TOKENS = 1024
"""Room per row that is asked for at first. It is address space: memory follows what is written."""

_ESTIMATED_EVERY = 32
"""Kept mass is estimated for the first decoded token and at every so many positions: by the
specification, which takes some milliseconds, as the core estimates only in layers of its own."""

_DENSE_ROWS = 128
"""Queries computed together under a token mask: 8 MiB of float64 logits per head and 8k tokens."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What all layers of a host's cache share. ``sparse`` None: exact attention."""

    backend: Backend
    sparse: SparseAttention | None = None
    cache_types: tuple[CacheType, CacheType] = ("q8_0", "q8_0")

    def layout(self, head_dim: int) -> PageLayout:
        """Pages of these types; a head_dim that no page holds is a ConfigError."""
        k_type, v_type = self.cache_types
        return PageLayout(k_type=k_type, v_type=v_type, head_dim=head_dim)


@dataclass(frozen=True, kw_only=True)
class Read:
    """One call of the kernels: which rows of which cache read what. ``lists`` None: everything.

    ``kept_mass`` f32 ``[Hq]`` is there for some decoded tokens with selector ``anchors``.
    """

    segment: Segment
    lists: BlockLists | None
    kept_mass: F32 | None = None


class LayerRows:
    """The pages of one layer, with one block table per row of the batch.

    A row holds its real tokens alone: padding is never written, so blocks count from the first
    real token, and a row's result does not depend on what it was batched with.

    `layer` is its number in the host's model: it may be exact, or have a budget of its own.
    """

    def __init__(
        self,
        settings: HostSettings,
        *,
        num_rows: int,
        num_kv_heads: int,
        head_dim: int,
        layer: int = 0,
    ) -> None:
        self.settings = settings
        # Each layer has pages of its own, as layer 0: the plan's layers mean nothing here.
        self._sparse = settings.sparse.of_layer(layer) if settings.sparse else None
        self.layout = settings.layout(head_dim)
        self.num_kv_heads = num_kv_heads
        self._caches = self._empty_caches(num_rows, _FIRST_TOKENS)

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self._caches)

    def num_tokens(self, row: int) -> int:
        """Tokens that `row` holds."""
        return self._caches[row].num_tokens

    @property
    def num_bytes(self) -> int:
        """Memory of the pages in use, without what selectors keep beside them."""
        blocks = sum(cache.num_blocks for cache in self._caches)
        return blocks * self.num_kv_heads * self.layout.page_bytes

    def __deepcopy__(self, _: dict[int, Any]) -> "LayerRows":
        """A copy of what is held, without the room that nothing was written to."""
        other = copy(self)
        other._caches = self._copied(self._caches, max(c.max_tokens for c in self._caches))
        return other

    # -- growing and shrinking ---------------------------------------------------------------
    def append(self, row: int, k: F32, v: F32) -> None:
        """Write keys and values f32 ``[T, Hkv, D]`` behind what `row` holds; T may be 0.

        Raises
        ------
        NumericalError
            A value is NaN, infinite, or too large for the cache type.
        """
        if not len(k):
            return
        start = self.num_tokens(row)
        end = start + len(k)
        self._make_room(row, end)
        cache = self._caches[row]
        cache.reserve(end)
        segment = self._segment(row, start=start, q_len=len(k), is_prefill=True, plan=None)
        self.settings.backend.append(segment, 0, k, v)
        cache.commit(end)

    def truncate(self, row: int, num_tokens: int) -> None:
        """Forget what `row` holds from `num_tokens` on."""
        self._caches[row].truncate(num_tokens)

    def pick(self, rows: list[int]) -> None:
        """Let the batch be these rows, in this order; one that is named twice is copied."""
        if rows == list(range(self.num_rows)):
            return
        capacity = max(cache.max_tokens for cache in self._caches)
        self._caches = self._copied([self._caches[row] for row in rows], capacity)

    # -- reading -----------------------------------------------------------------------------
    def attend(
        self,
        row: int,
        q: F32,
        *,
        start: int,
        num_prompt: int,
        prompt_len: int,
        scale: float,
        record: bool = True,
    ) -> tuple[F32, list[Read]]:
        """Attention of tokens ``start .. start + T`` of `row`, whose keys are in its pages.

        Parameters
        ----------
        q : f32 ``[T, Hq, D]``
        num_prompt : how many of them belong to the prompt; the others are decoded, one by one
        prompt_len : tokens of the whole prompt, whose last ones are read exactly
        scale : factor of the logits
        record : whether a prompt's queries add to the importance of what they read

        Returns
        -------
        f32 ``[T, Hq, D]``, and what each call of the kernels read
        """
        pieces = [(0, num_prompt)] if num_prompt else []
        pieces += [(t, t + 1) for t in range(num_prompt, len(q))]
        outputs: list[F32] = []
        reads: list[Read] = []
        backend = self.settings.backend
        for first, last in pieces:
            is_prefill = first < num_prompt
            plan = sparse_plan(self._sparse, prompt_len=prompt_len, is_prefill=is_prefill)
            segment = self._segment(
                row,
                start=start + first,
                q_len=last - first,
                is_prefill=is_prefill,
                plan=plan,
                record=record and is_prefill,
            )
            rows = np.ascontiguousarray(q[first:last])
            lists = backend.select(segment, 0, rows, scale=scale)
            outputs.append(backend.attend(segment, 0, rows, scale=scale, lists=lists))
            kept = None
            if segment.start == prompt_len or segment.start % _ESTIMATED_EVERY == 0:
                kept = kept_mass(segment, 0, rows, scale=scale, lists=lists)
            reads.append(Read(segment=segment, lists=lists, kept_mass=kept))
        return np.concatenate(outputs), reads

    def attend_tokens(self, row: int, q: F32, *, tokens: Bool, scale: float) -> F32:
        """Attention of q f32 ``[T, Hq, D]`` under a token mask ``[T, n]`` over all n tokens held.

        Exact, in float64 over the values that the cache holds, and slow: for masks that no
        kernel reads.
        """
        end = self.num_tokens(row)
        if tokens.shape != (len(q), end):
            raise ShapeError(
                f"[attend_tokens] tokens: expected ({len(q)}, {end}), got {tokens.shape}"
            )
        k, v = self._caches[row].read(0)
        by_head = q.transpose(1, 0, 2)
        parts = [
            dense_attention(
                by_head[:, first : first + _DENSE_ROWS],
                k,
                v,
                tokens[first : first + _DENSE_ROWS],
                scale=scale,
            ).out
            for first in range(0, len(q), _DENSE_ROWS)
        ]
        return np.concatenate(parts, axis=1).transpose(1, 0, 2).astype(np.float32)

    # -- inside ------------------------------------------------------------------------------
    def _segment(
        self,
        row: int,
        *,
        start: int,
        q_len: int,
        is_prefill: bool,
        plan: SparsePlan | None,
        record: bool = False,
    ) -> Segment:
        """As `KVCache.segment`, but for rows anywhere in the cache: they are written already."""
        cache = self._caches[row]
        return Segment(
            start=start,
            q_len=q_len,
            is_prefill=is_prefill,
            layout=self.layout,
            pages=cache.pool.pages,
            block_table=cache.block_table[: cache.num_blocks],
            sparse=plan,
            index_layout=cache.index_layout,
            index=cache.index,
            importance=cache.importance,
            record_importance=record and cache.importance is not None,
        )

    def _make_room(self, row: int, num_tokens: int) -> None:
        """Twice the room where a row outgrows what it has, so that copying stays rare."""
        if num_tokens > self._caches[row].max_tokens:
            self._caches = self._copied(self._caches, 2 * num_tokens)

    def _empty_caches(self, num_rows: int, max_tokens: int) -> list[KVCache]:
        sparse = self._sparse
        pool = BlockPool(
            self.layout,
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            num_blocks=num_rows * blocks_for(max_tokens),
        )
        index_layout = None if sparse is None else selector_index(sparse, self.layout)
        return [
            KVCache(
                pool,
                max_tokens=max_tokens,
                index_layout=index_layout,
                keeps_importance=sparse is not None and sparse.uses_importance,
            )
            for _ in range(num_rows)
        ]

    def _copied(self, sources: list[KVCache], max_tokens: int) -> list[KVCache]:
        copies = self._empty_caches(len(sources), max_tokens)
        for source, target in zip(sources, copies, strict=True):
            held = source.num_tokens
            target.reserve(held)
            pages = source.block_table[: target.num_blocks]
            mine = target.block_table[: target.num_blocks]
            target.pool.pages[0, mine] = source.pool.pages[0, pages]
            if target.index is not None and source.index is not None:
                layout = target.index_layout
                groups = 0 if layout is None else layout.num_groups(held)
                target.index[:, :groups] = source.index[:, :groups]
            if target.importance is not None and source.importance is not None:
                target.importance[:, :held] = source.importance[:, :held]
            target.commit(held)
        return copies
