"""The C++ core behind the `Backend` protocol: checks arguments, then calls into `_native`.

The only module that imports `_native`. Results have the same bits for every instruction set,
thread count and split of the rows; they agree with `reference` up to the order of float sums.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from kvsieve.errors import ConfigError, ModelFileError, NumericalError, ShapeError
from kvsieve.kernels.backend import (
    AttentionTrace,
    BlockLists,
    LayerShape,
    LayerWeights,
    Segment,
    SegmentStats,
    StepStats,
    WeightKind,
    WeightSource,
)
from kvsieve.kernels.checks import (
    check_f32,
    check_kept,
    check_layer,
    check_lists,
    check_queries,
    check_segment,
    count_tiles,
)
from kvsieve.kernels.layout import GROUP
from kvsieve.kernels.native_segment import kept_mass, segment_fields
from kvsieve.kernels.threads import default_threads
from kvsieve.types import BLOCK_SIZE, F32, I32

try:
    from kvsieve import _native
except ImportError as error:  # reported when a backend is asked for: the reference works without
    _native = None
    _import_error: ImportError | None = error
else:
    _import_error = None

MAX_HEAD_DIM = 512
MAX_THREADS = 1024
PANEL = 16
"""Output rows that are packed together."""

_SLICE_VALUES = 1 << 21
"""Weights packed at once: bounds what a `RowSource` has in memory (8 MiB)."""

_LARGEST = {"q4": "5.2e5", "q8": "8.3e6"}
"""Where a float16 scale ends: 65504 times 8, and times 127."""


def supported_isas() -> dict[str, bool]:
    """Instruction sets built in, best first, and whether this processor has them."""
    return dict(_module().isa_list())


def _module() -> Any:
    if _native is None:
        raise ConfigError(
            f"[NativeBackend] the C++ core is not built ({_import_error}): run `pip install .` in "
            "the source tree, or use backend='reference'"
        )
    return _native


class NativeBackend:
    """Numeric primitives in C++.

    threads  None: one per fast physical core that this process may use
    isa      None: the best one; else a name of `supported_isas`
    """

    name = "native"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        available = supported_isas()
        usable = [name for name, supported in available.items() if supported]
        if isa is not None and isa not in usable:
            why = "this processor lacks it" if isa in available else "no such instruction set"
            raise ConfigError(
                f"[NativeBackend] isa: expected one of {', '.join(usable)}, got {isa!r} ({why})"
            )
        if threads is None:
            threads = default_threads()
        if (
            isinstance(threads, bool)
            or not isinstance(threads, int)
            or not 1 <= threads <= MAX_THREADS
        ):
            raise ConfigError(
                f"[NativeBackend] threads: expected 1 to {MAX_THREADS}, got {threads!r}"
            )
        self._isa = isa or usable[0]
        self._chosen = "asked for" if isa else "the best this processor has"
        self._arena = _module().Arena()  # weights outlive the backend if somebody keeps them
        self._engine = _module().Engine(self._isa, threads)

    @property
    def isa(self) -> str:
        return self._isa

    @property
    def threads(self) -> int:
        return int(self._engine.threads)

    def describe(self) -> str:
        """One line: the instruction set in use, why, and what else is built in."""
        others = [
            f"{name} ({'available' if supported else 'not on this processor'})"
            for name, supported in supported_isas().items()
            if name != self._isa
        ]
        return f"{self._isa} ({self._chosen}); also built in: {', '.join(others)}"

    # -- dense ---------------------------------------------------------------------------

    def pack_weight(self, source: WeightSource, *, kind: WeightKind | None = None) -> Any:
        """Pack a matrix into panels of 16 output rows.

        Parameters
        ----------
        source : the matrix as a file holds it; ``cols`` a multiple of 32
        kind : ``q4`` for q4_0 and q4_1 sources, ``q8`` for q8_0; ``q8`` (default), ``q4`` or
            ``f32`` for f32

        Raises
        ------
        ShapeError
            if the data does not hold ``rows x cols`` values
        ModelFileError
            if a value is too large for a group with an f16 scale
        """
        target = kind or _default_kind(source)
        _check_source(source, target)
        weight = _module().Weight(source.format, source.rows, source.cols, target, self._arena)
        step = max(1, _SLICE_VALUES // source.cols // PANEL) * PANEL
        for first in range(0, source.rows, step):
            if not weight.fill(np.ascontiguousarray(source.data[first : first + step]), first):
                raise ModelFileError(
                    f"[pack_weight] values: expected magnitudes below {_LARGEST[target]} "
                    "(f16 scales), got more"
                )
        return weight

    def project(self, x: F32, weight: Any) -> F32:
        """``y = x @ W.T``: f32 ``[T, rows]`` from x f32 ``[T, cols]``."""
        check_f32("project", "x", x, (None, weight.cols))
        y = np.empty((x.shape[0], weight.rows), np.float32)
        if x.shape[0]:
            self._check_finite("project", self._engine.project(x, weight, y), name="x")
        return y

    def rms_norm(self, x: F32, weight: F32, *, eps: float) -> F32:
        """``x / sqrt(mean(x^2) + eps) * weight`` per row; f32 ``[T, W]``, W a multiple of 16."""
        check_f32("rms_norm", "weight", weight, (None,))
        check_f32("rms_norm", "x", x, (None, len(weight)))
        _check_multiple("rms_norm", "W", len(weight), 16)
        y = np.empty_like(x)
        self._engine.rms_norm(x, weight, eps, y)
        return y

    def rope(self, x: F32, cos: F32, sin: F32, *, interleaved: bool) -> F32:
        """Rotate the first ``2n`` channels of x f32 ``[T, H, D]`` by cos, sin f32 ``[T, n]``."""
        check_f32("rope", "x", x, (None, None, None))
        check_f32("rope", "cos", cos, (x.shape[0], None))
        check_f32("rope", "sin", sin, cos.shape)
        if 2 * cos.shape[1] > x.shape[2]:
            raise ShapeError(f"[rope] cos: expected at most D/2 columns, got {cos.shape[1]}")
        y: F32 = x.copy()
        self._engine.rope(y, cos, sin, interleaved)
        return y

    def silu_mul(self, gate: F32, up: F32) -> F32:
        """``gate * sigmoid(gate) * up``; f32 of one shape, size a multiple of 16."""
        check_f32("silu_mul", "up", up, gate.shape)
        check_f32("silu_mul", "gate", gate, up.shape)
        _check_multiple("silu_mul", "size", gate.size, 16)
        y = np.empty_like(gate)
        self._engine.silu_mul(gate, up, y)
        return y

    def gelu_mul(self, gate: F32, up: F32) -> F32:
        """``gelu(gate) * up`` in gelu's tanh form; as `silu_mul`."""
        check_f32("gelu_mul", "up", up, gate.shape)
        check_f32("gelu_mul", "gate", gate, up.shape)
        _check_multiple("gelu_mul", "size", gate.size, 16)
        y = np.empty_like(gate)
        self._engine.gelu_mul(gate, up, y)
        return y

    # -- one layer of one segment ----------------------------------------------------------

    def append(self, segment: Segment, layer: int, k: F32, v: F32) -> None:
        """Quantise and store the segment's rows; k, v f32 ``[Tq, Hkv, D]``, after rope.

        Raises
        ------
        NumericalError
            if a value is NaN, infinite or too large for an f16 side (its row is not written)
        """
        check_segment("append", segment)
        shape = (segment.q_len, segment.pages.shape[2], segment.layout.head_dim)
        check_f32("append", "k", k, shape)
        check_f32("append", "v", v, shape)
        keys = np.require(k, requirements="W")  # the core rotates in place, though not here
        if not self._engine.append(self._step(segment, layer), layer, keys, v):
            raise NumericalError(
                "[append] k, v: expected finite values that fit the cache type, got NaN, "
                "infinity or larger ones"
            )

    def score_blocks(self, segment: Segment, layer: int, q: F32, *, scale: float) -> F32:
        """Best sampled logit of each selection block: f32 ``[Hq, Nb]``, q f32 ``[1, Hq, D]``."""
        if segment.sparse is None:
            raise ConfigError("[score_blocks] segment.sparse: expected a SparsePlan, got None")
        check_segment("score_blocks", segment)
        check_queries("score_blocks", segment, q)
        rows = q.copy()  # the core scales it in place
        step = self._step(segment, layer)
        out = np.empty((q.shape[1], self._engine.score_stride(step)), np.float32)
        heads = segment.pages.shape[2]
        self._check_finite("score_blocks", self._engine.score(step, layer, rows, heads, scale, out))
        end = segment.start + segment.q_len
        return np.ascontiguousarray(out[:, : -(-end // segment.sparse.block_size)])

    def select(self, segment: Segment, layer: int, q: F32, *, scale: float) -> BlockLists | None:
        """Blocks to read (docs/selection.md, 3, 4, 6); None where everything runs exactly."""
        if segment.sparse is None:
            return None
        check_segment("select", segment)
        check_queries("select", segment, q)
        rows = q.copy()  # the core scales it in place
        heads = segment.pages.shape[2]
        found = self._engine.select(self._step(segment, layer), layer, rows, heads, scale)
        self._check_finite("select", found is not None)
        if all(length < 0 for length in found[2]):
            return None
        return _block_lists(segment, found)

    def attend(
        self, segment: Segment, layer: int, q: F32, *, scale: float, lists: BlockLists | None
    ) -> F32:
        """Attention of the segment's rows over its pages: f32 ``[Tq, Hq, D]``, q likewise."""
        check_segment("attend", segment)
        check_queries("attend", segment, q)
        rows = q.copy()  # the core scales it in place
        heads = segment.pages.shape[2]
        if lists is None:
            tiles = count_tiles(segment)
            form: tuple[Any, ...] = (heads, tiles, [-1] * (heads * tiles), [])
        else:
            check_lists(segment, lists, num_q_heads=q.shape[1])
            lengths = np.diff(lists.indptr).tolist()
            form = (lists.num_heads, lists.num_tiles, lengths, lists.indices.tolist())
        out: F32 = np.empty_like(rows)
        ok = self._engine.attend(self._step(segment, layer), layer, rows, heads, scale, *form, out)
        self._check_finite("attend", ok)
        return out

    # -- the whole layer ---------------------------------------------------------------------

    def build_layer(self, shape: LayerShape, weights: LayerWeights) -> Any:
        """Check that the matrices fit the shape, and hand both to the core."""
        if shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 16:
            raise ConfigError(
                f"[build_layer] head_dim: expected a multiple of 16 up to {MAX_HEAD_DIM}, got "
                f"{shape.head_dim}"
            )
        check_layer(shape, weights)
        tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
        numbers = {field.name: getattr(shape, field.name) for field in fields(shape)}
        gelu = numbers.pop("gate") == "gelu"
        return _module().Layer(**numbers, gelu=gelu, tensors=tensors)

    def begin_step(self, segments: Sequence[Segment], cos: F32, sin: F32) -> Any:
        """Prepare a step over `segments`; cos, sin f32 ``[T, rope_dim/2]`` for all their rows."""
        rows = sum(segment.q_len for segment in segments)
        check_f32("begin_step", "cos", cos, (rows, None))
        check_f32("begin_step", "sin", sin, cos.shape)
        step = _module().Step(cos, sin)
        for segment in segments:
            step.add_segment(segment_fields(segment))
        return step

    def run_layer(
        self, layer: Any, index: int, hidden: F32, step: Any, *, kept: I32 | None = None
    ) -> None:
        """Run one decoder layer on hidden f32 ``[T, W]``, in place.

        kept : i32, ascending rows that are needed afterwards; None: all
            The others take part in the cache and in attention, and end as they were.

        Raises
        ------
        NumericalError
            if an activation is NaN or infinite, or a key or value too large for an f16 cache
        """
        check_f32("run_layer", "hidden", hidden, (step.rows, None))
        check_kept(kept, num_rows=step.rows)
        if not self._engine.run_layer(layer, index, hidden, step, kept):
            raise NumericalError(
                f"[run_layer] layer {index}: expected finite activations, and keys and values that "
                "fit the cache type, got NaN, infinity or larger ones"
            )

    def step_stats(self, step: Any) -> StepStats:
        """Times and counts of the layers run so far."""
        dense, attention, select, *pairs = step.counts()
        return StepStats(
            dense_ns=dense,
            attention_ns=attention,
            select_ns=select,
            segments=[
                SegmentStats(
                    pairs_attended=pairs[2 * i],
                    pairs_causal=pairs[2 * i + 1],
                    kept_mass=kept_mass(step, i),
                )
                for i in range(len(pairs) // 2)
            ],
        )

    def last_attention(self, segment: Segment, *, num_q_heads: int) -> AttentionTrace:
        """What the last `run_layer` attended with; `segment` was the only one of its step."""
        q = np.empty((segment.q_len, num_q_heads, segment.layout.head_dim), np.float32)
        out = np.empty_like(q)
        found = self._engine.last_attention(q, out)
        exact = all(length < 0 for length in found[2])
        return AttentionTrace(q=q, out=out, lists=None if exact else _block_lists(segment, found))

    def _step(self, segment: Segment, layer: int) -> Any:
        if not 0 <= layer < segment.pages.shape[0]:
            raise ShapeError(
                f"[Segment] layer: expected 0 to {segment.pages.shape[0] - 1}, got {layer}"
            )
        nothing = np.zeros((segment.q_len, 1), np.float32)  # these steps do not rotate
        return self.begin_step([segment], nothing, nothing)

    @staticmethod
    def _check_finite(function: str, ok: bool, *, name: str = "q") -> None:
        if not ok:
            raise NumericalError(
                f"[{function}] {name}: expected finite values, got NaN or infinity"
            )


# -- checks --------------------------------------------------------------------------------


def _default_kind(source: WeightSource) -> WeightKind:
    return "q4" if source.format in ("q4_0", "q4_1") else "q8"


def _check_multiple(function: str, name: str, value: int, factor: int) -> None:
    if value % factor:
        raise ShapeError(f"[{function}] {name}: expected a multiple of {factor}, got {value}")


def _check_source(source: WeightSource, kind: str) -> None:
    _check_multiple("pack_weight", "cols", source.cols, GROUP)
    allowed = {"f32": ("q8", "q4", "f32"), "q4_0": ("q4",), "q4_1": ("q4",), "q8_0": ("q8",)}
    if kind not in allowed.get(source.format, ()):
        raise ConfigError(
            f"[pack_weight] kind: expected {' or '.join(allowed.get(source.format, ()))} for a "
            f"{source.format} source, got {kind!r}"
        )
    per_block = {"f32": 4 * GROUP, "q4_0": 18, "q4_1": 20, "q8_0": 34}[source.format]
    row = source.cols // GROUP * per_block // (4 if source.format == "f32" else 1)
    dtype = np.float32 if source.format == "f32" else np.uint8
    if source.data.shape != (source.rows, row) or source.data.dtype != dtype:
        raise ShapeError(
            f"[pack_weight] data: expected {np.dtype(dtype)} ({source.rows}, {row}), got "
            f"{source.data.dtype} {source.data.shape}"
        )


def _block_lists(segment: Segment, found: tuple[int, int, list[int], list[int]]) -> BlockLists:
    """CSR lists from the core's, exact tiles (length -1) written out as all their causal blocks."""
    num_heads, num_tiles, lengths, blocks = found
    rows: list[I32] = []
    next_block, first = 0, segment.start // BLOCK_SIZE
    for row, length in enumerate(lengths):
        if length < 0:
            rows.append(np.arange(first + row % num_tiles + 1, dtype=np.int32))
        else:
            rows.append(np.asarray(blocks[next_block : next_block + length], np.int32))
            next_block += length
    return BlockLists(
        num_heads=num_heads,
        num_tiles=num_tiles,
        indptr=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        indices=np.concatenate(rows),
    )
