"""One decoder layer: norm, q/k/v, rotation, cache, selection, attention, output, MLP."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from kvsieve.kernels.backend import (
    AttentionTrace,
    BlockLists,
    LayerShape,
    LayerWeights,
    Segment,
    SegmentStats,
    StepStats,
)
from kvsieve.kernels.checks import check_f32, check_kept, check_layer, check_segment
from kvsieve.kernels.layer_parts import after_attention, before_attention
from kvsieve.kernels.reference import dense
from kvsieve.kernels.reference.attention import attend
from kvsieve.kernels.reference.pages import append
from kvsieve.kernels.reference.segment_selection import choose, count_pairs, kept_mass
from kvsieve.types import F32, I32


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's shape and packed weights, checked against each other."""

    shape: LayerShape
    weights: LayerWeights


@dataclass(frozen=True, kw_only=True)
class Step:
    """The rows of one step: segments one after the other, rotation angles, and what it cost."""

    segments: tuple[Segment, ...]
    cos: F32
    sin: F32
    stats: StepStats

    @property
    def num_rows(self) -> int:
        """Rows of all segments."""
        return sum(segment.q_len for segment in self.segments)


def build_layer(shape: LayerShape, weights: LayerWeights) -> Layer:
    """A layer, once its weights have been found to fit its shape.

    Raises
    ------
    ConfigError
        Query heads are not a multiple of KV heads, or the rotated channels do not fit a head.
    ShapeError
        A matrix or vector has the wrong size.
    """
    check_layer(shape, weights)
    return Layer(shape=shape, weights=weights)


def begin_step(segments: Sequence[Segment], cos: F32, sin: F32) -> Step:
    """A step over the rows of `segments`.

    Parameters
    ----------
    cos, sin : f32 ``[T, rope_dim / 2]``, one row per row of the step

    Raises
    ------
    ShapeError
        The angles do not have the segments' rows, or a segment's arrays do not hold its tokens.
    """
    for segment in segments:
        check_segment("begin_step", segment)
    num_rows = sum(segment.q_len for segment in segments)
    check_f32("begin_step", "cos", cos, (num_rows, None))
    check_f32("begin_step", "sin", sin, cos.shape)
    stats = StepStats(segments=[SegmentStats() for _ in segments])
    return Step(segments=tuple(segments), cos=cos, sin=sin, stats=stats)


def run_layer(
    layer: Layer, index: int, hidden: F32, step: Step, *, kept: I32 | None = None
) -> list[AttentionTrace]:
    """Layer number `index` over all rows of a step; `hidden` f32 ``[T, W]`` changes in place.

    `kept` are the rows that are needed afterwards, i32, ascending; None: all. The others take part
    in the cache and in attention, and end as they were.

    Time for the cache's append counts as attention. Returns what each segment attended with.
    """
    shape, weights = layer.shape, layer.weights
    check_f32("run_layer", "hidden", hidden, (step.num_rows, shape.hidden_size))
    check_kept(kept, num_rows=step.num_rows)
    clock = _Clock(step.stats)

    q, k, v = before_attention(dense, shape, weights, hidden=hidden, cos=step.cos, sin=step.sin)
    clock.charge("dense_ns")

    attended = np.empty_like(q)
    traces: list[AttentionTrace] = []
    start = 0
    for segment, stats in zip(step.segments, step.stats.segments, strict=True):
        rows = slice(start, start + segment.q_len)
        append(segment, index, k[rows], v[rows])
        clock.charge("attention_ns")
        lists: BlockLists | None = None
        if not shape.window:  # a window is read exactly, whatever the plan
            lists = choose(segment, index, q[rows], scale=shape.attention_scale)
        clock.charge("select_ns")
        attended[rows] = attend(
            segment,
            index,
            q[rows],
            scale=shape.attention_scale,
            lists=lists,
            window=shape.window,
        )
        folded = q[rows] * np.float32(shape.attention_scale)
        traces.append(AttentionTrace(q=folded, out=attended[rows], lists=lists))
        attended_pairs, causal_pairs = count_pairs(segment, lists, window=shape.window)
        stats.pairs_attended += attended_pairs
        stats.pairs_causal += causal_pairs
        mass = kept_mass(segment, index, q[rows], scale=shape.attention_scale, lists=lists)
        if mass is not None:
            before = [] if stats.kept_mass is None else [stats.kept_mass]
            stats.kept_mass = np.concatenate([*before, mass[None]])
        clock.charge("attention_ns")
        start = rows.stop

    rows_kept = slice(None) if kept is None else kept
    if kept is None or len(kept):
        hidden[rows_kept] = after_attention(
            dense, shape, weights, hidden=hidden[rows_kept], attended=attended[rows_kept]
        )
    clock.charge("dense_ns")
    return traces


class _Clock:
    """Charges the time since the last charge to one counter of a step."""

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats
        self._last = perf_counter_ns()

    def charge(self, counter: str) -> None:
        now = perf_counter_ns()
        setattr(self._stats, counter, getattr(self._stats, counter) + now - self._last)
        self._last = now
