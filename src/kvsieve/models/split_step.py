"""A step in which blocks are chosen in Python: each layer's call is split in two around the choice.

Slower than a selector of the kernels: the past keys are turned into floats for every layer and
token, and the layer's parts are calls of their own. Layers that read everything are whole calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvsieve.errors import ConfigError
from kvsieve.kernels.backend import (
    Backend,
    BlockLists,
    LayerShape,
    LayerWeights,
    Segment,
    SegmentStats,
    StepStats,
)
from kvsieve.kernels.layer_parts import after_attention, before_attention
from kvsieve.kernels.reference.pages import read_keys
from kvsieve.kernels.reference.segment_selection import count_pairs
from kvsieve.types import BLOCK_SIZE, F32, I32


def chooses_in_python(segments: Sequence[Segment]) -> bool:
    """Whether any of a step's segments brings a rule of its own."""
    return any(s.sparse is not None and s.sparse.rule is not None for s in segments)


@dataclass(frozen=True, kw_only=True)
class SplitStep:
    """The rows of one step, as `Backend.begin_step` takes them, and what it cost so far.

    whole   a step of the backend for the layers that read everything
    """

    backend: Backend
    segments: tuple[Segment, ...]
    cos: F32
    sin: F32
    whole: Any
    own: StepStats

    @classmethod
    def begin(
        cls, backend: Backend, segments: Sequence[Segment], cos: F32, sin: F32
    ) -> "SplitStep":
        """Checks as `Backend.begin_step` does; ConfigError if a segment's selector is another's."""
        if any(s.sparse is not None and s.sparse.rule is None for s in segments):
            raise ConfigError(
                "[Decoder] segments: expected a rule in Python for all or none of them, got both"
            )
        exact = [replace(segment, sparse=None) for segment in segments]
        return cls(
            backend=backend,
            segments=tuple(segments),
            cos=cos,
            sin=sin,
            whole=backend.begin_step(exact, cos, sin),
            own=StepStats(segments=[SegmentStats() for _ in segments]),
        )

    def run_layer(
        self,
        layer: Any,
        parts: tuple[LayerShape, LayerWeights],
        index: int,
        *,
        hidden: F32,
        kept: I32 | None = None,
    ) -> None:
        """As `Backend.run_layer`; `parts` are what `layer` was built from."""
        shape, weights = parts
        if shape.window or not any(_is_sparse(segment, index) for segment in self.segments):
            self.backend.run_layer(layer, index, hidden, self.whole, kept=kept)
            return
        start = perf_counter_ns()
        q, k, v = before_attention(
            self.backend, shape, weights, hidden=hidden, cos=self.cos, sin=self.sin
        )
        attended = np.empty_like(q)
        first, other_ns = 0, 0
        for segment, stats in zip(self.segments, self.own.segments, strict=True):
            rows = slice(first, first + segment.q_len)
            first = rows.stop
            begun = perf_counter_ns()
            exact = replace(segment, sparse=None)
            self.backend.append(exact, index, k[rows], v[rows])
            lists = _choose(segment, index, q[rows], scale=shape.attention_scale)
            chosen = perf_counter_ns()
            attended[rows] = self.backend.attend(
                exact, index, q[rows], scale=shape.attention_scale, lists=lists
            )
            done = perf_counter_ns()
            self.own.select_ns += chosen - begun
            self.own.attention_ns += done - chosen
            other_ns += done - begun
            attended_pairs, causal_pairs = count_pairs(segment, lists)
            stats.pairs_attended += attended_pairs
            stats.pairs_causal += causal_pairs
        wanted = slice(None) if kept is None else kept
        if kept is None or len(kept):
            hidden[wanted] = after_attention(
                self.backend, shape, weights, hidden=hidden[wanted], attended=attended[wanted]
            )
        self.own.dense_ns += perf_counter_ns() - start - other_ns

    def stats(self) -> StepStats:
        """As `Backend.step_stats`."""
        whole = self.backend.step_stats(self.whole)
        return StepStats(
            dense_ns=whole.dense_ns + self.own.dense_ns,
            attention_ns=whole.attention_ns + self.own.attention_ns,
            select_ns=whole.select_ns + self.own.select_ns,
            segments=[
                SegmentStats(
                    pairs_attended=a.pairs_attended + b.pairs_attended,
                    pairs_causal=a.pairs_causal + b.pairs_causal,
                )
                for a, b in zip(whole.segments, self.own.segments, strict=True)
            ],
        )


def _is_sparse(segment: Segment, layer: int) -> bool:
    plan = segment.sparse
    if plan is None or layer in plan.exact_layers:
        return False
    plan = plan.of_layer(layer)
    end = segment.start + segment.q_len
    if not segment.is_prefill:
        return plan.decode_is_sparse(end)
    # Later tiles see more blocks: if any before the exact tail is sparse, the last one is.
    return plan.tile_is_sparse(min(-(-end // BLOCK_SIZE), plan.exact_from_tile) - 1)


def _choose(segment: Segment, layer: int, q: F32, *, scale: float) -> BlockLists | None:
    """What the segment's rule reads for q f32 ``[Tq, Hq, D]``; None: everything."""
    if not _is_sparse(segment, layer) or segment.sparse is None or segment.sparse.rule is None:
        return None
    plan = segment.sparse.of_layer(layer)
    end = segment.start + segment.q_len
    blocks = np.arange(-(-end // BLOCK_SIZE), dtype=np.int32)
    heads = range(segment.pages.shape[2])
    keys = np.stack([read_keys(segment, layer, head, blocks).floats()[:end] for head in heads])
    queries = np.ascontiguousarray(q.transpose(1, 0, 2))
    return segment.sparse.rule.block_lists(
        queries, keys, plan=plan, is_prefill=segment.is_prefill, scale=scale
    )
