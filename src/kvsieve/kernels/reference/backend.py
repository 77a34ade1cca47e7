"""`ReferenceBackend`: the specification behind the `Backend` protocol."""

from collections.abc import Sequence

from kvsieve.errors import ConfigError
from kvsieve.kernels.backend import (
    AttentionTrace,
    BlockLists,
    LayerShape,
    LayerWeights,
    Segment,
    StepStats,
    WeightKind,
    WeightSource,
)
from kvsieve.kernels.checks import check_f32, check_lists, check_queries, check_segment
from kvsieve.kernels.reference import attention, dense, pages, segment_selection
from kvsieve.kernels.reference import layer as layers
from kvsieve.types import F32, I32


class ReferenceBackend:
    """Every primitive in NumPy, written to be read; see the module of each for what it computes.

    `threads` is accepted for symmetry with the native core and must be 1.
    """

    def __init__(self, threads: int | None = 1) -> None:
        if threads not in (None, 1):
            raise ConfigError(f"[ReferenceBackend] threads: expected 1, got {threads!r}")
        self._last_attention: list[AttentionTrace] = []

    @property
    def name(self) -> str:
        """``reference``."""
        return "reference"

    @property
    def isa(self) -> str:
        """``numpy``: no instruction set is chosen here."""
        return "numpy"

    @property
    def threads(self) -> int:
        """Always 1."""
        return 1

    # -- dense -----------------------------------------------------------------------------------
    def pack_weight(
        self, source: WeightSource, *, kind: WeightKind | None = None
    ) -> dense.PackedWeight:
        """See `dense.pack_weight`."""
        return dense.pack_weight(source, kind=kind)

    def project(self, x: F32, weight: dense.PackedWeight) -> F32:
        """See `dense.project`."""
        return dense.project(x, weight)

    def rms_norm(self, x: F32, weight: F32, *, eps: float) -> F32:
        """See `dense.rms_norm`."""
        return dense.rms_norm(x, weight, eps=eps)

    def rope(self, x: F32, cos: F32, sin: F32, *, interleaved: bool) -> F32:
        """See `dense.rope`."""
        return dense.rope(x, cos, sin, interleaved=interleaved)

    def silu_mul(self, gate: F32, up: F32) -> F32:
        """See `dense.silu_mul`."""
        return dense.silu_mul(gate, up)

    def gelu_mul(self, gate: F32, up: F32) -> F32:
        """See `dense.gelu_mul`."""
        return dense.gelu_mul(gate, up)

    # -- cache, selection, attention: one layer of one segment -----------------------------------
    def append(self, segment: Segment, layer: int, k: F32, v: F32) -> None:
        """Keys and values f32 ``[Tq, Hkv, D]`` into the cache; see `pages.append`."""
        check_segment("append", segment)
        shape = (segment.q_len, segment.pages.shape[2], segment.layout.head_dim)
        check_f32("append", "k", k, shape)
        check_f32("append", "v", v, shape)
        pages.append(segment, layer, k, v)

    def score_blocks(self, segment: Segment, layer: int, q: F32, *, scale: float) -> F32:
        """Scores f32 ``[Hq, Nb]`` of q f32 ``[1, Hq, D]``; see `segment_selection.score_blocks`."""
        _check_queries("score_blocks", segment, q)
        return segment_selection.score_blocks(segment, layer, q, scale=scale)

    def select(self, segment: Segment, layer: int, q: F32, *, scale: float) -> BlockLists | None:
        """Blocks for q f32 ``[Tq, Hq, D]``; see `segment_selection.select`."""
        _check_queries("select", segment, q)
        return segment_selection.select(segment, layer, q, scale=scale)

    def attend(
        self, segment: Segment, layer: int, q: F32, *, scale: float, lists: BlockLists | None
    ) -> F32:
        """Attention of q f32 ``[Tq, Hq, D]``, same shape out; see `attention.attend`."""
        _check_queries("attend", segment, q)
        if lists is not None:
            check_lists(segment, lists, num_q_heads=q.shape[1])
        return attention.attend(segment, layer, q, scale=scale, lists=lists)

    # -- the whole layer: one call ---------------------------------------------------------------
    def build_layer(self, shape: LayerShape, weights: LayerWeights) -> layers.Layer:
        """See `layer.build_layer`."""
        return layers.build_layer(shape, weights)

    def begin_step(self, segments: Sequence[Segment], cos: F32, sin: F32) -> layers.Step:
        """See `layer.begin_step`."""
        return layers.begin_step(segments, cos, sin)

    def run_layer(
        self,
        layer: layers.Layer,
        index: int,
        hidden: F32,
        step: layers.Step,
        *,
        kept: I32 | None = None,
    ) -> None:
        """See `layer.run_layer`."""
        self._last_attention = layers.run_layer(layer, index, hidden, step, kept=kept)

    def step_stats(self, step: layers.Step) -> StepStats:
        """What the step has cost and read so far."""
        return step.stats

    def last_attention(self, segment: Segment, *, num_q_heads: int) -> AttentionTrace:
        """What the last `run_layer` attended with; `segment` was the only one of its step."""
        (trace,) = self._last_attention
        return trace


def _check_queries(function: str, segment: Segment, q: F32) -> None:
    check_segment(function, segment)
    check_queries(function, segment, q)
