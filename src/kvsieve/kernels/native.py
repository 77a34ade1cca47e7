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
    BlockLists,
    LayerShape,
    LayerWeights,
    Segment,
    SegmentStats,
    StepStats,
    WeightKind,
    WeightSource,
    check_f32,
)
from kvsieve.kernels.layout import GROUP
from kvsieve.kernels.threads import default_threads
from kvsieve.types import BLOCK_SIZE, F32

try:
    from kvsieve import _native
except ImportError as error:  # reported when a backend is asked for: the reference works without
    _native = None  # type: ignore[assignment]
    _import_error: ImportError | None = error
else:
    _import_error = None

MAX_HEAD_DIM = 512
MAX_THREADS = 1024


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
        kind : ``q4`` for q4_0 and q4_1 sources, ``q8`` for q8_0, ``q8`` (default) or ``f32`` for
            f32

        Raises
        ------
        ShapeError
            if the data does not hold ``rows x cols`` values
        ModelFileError
            if a value is too large for an 8-bit group with an f16 scale
        """
        target = kind or _default_kind(source)
        _check_source(source, target)
        data = np.ascontiguousarray(source.data)
        weight = _module().pack_weight(data, source.format, source.rows, source.cols, target)
        if weight is None:
            raise ModelFileError(
                "[pack_weight] values: expected magnitudes below 8.3e6 (f16 scales), got more"
            )
        return weight

    def project(self, x: F32, weight: Any) -> F32:
        """``y = x @ W.T``: f32 ``[T, rows]`` from x f32 ``[T, cols]``."""
        check_f32("project", "x", x, (None, weight.cols))
        y = np.empty((x.shape[0], weight.rows), np.float32)
        if x.shape[0]:
            self._engine.project(x, weight, y)
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
        y = x.copy()
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

    # -- one layer of one segment ----------------------------------------------------------

    def append(self, segment: Segment, layer: int, k: F32, v: F32) -> None:
        """Quantise and store the segment's rows; k, v f32 ``[Tq, Hkv, D]``, after rope.

        Raises
        ------
        NumericalError
            if a value is NaN or infinite (that token is not written)
        """
        shape = (segment.q_len, segment.pages.shape[2], segment.layout.head_dim)
        check_f32("append", "k", k, shape)
        check_f32("append", "v", v, shape)
        keys = np.require(k, requirements="W")  # the core rotates in place, though not here
        if not self._engine.append(self._step(segment, layer), layer, keys, v):
            raise NumericalError("[append] k, v: expected finite values, got NaN or infinity")

    def score_blocks(self, segment: Segment, layer: int, q: F32, *, scale: float) -> F32:
        """Best sampled logit of each selection block: f32 ``[Hq, Nb]``, q f32 ``[1, Hq, D]``."""
        if segment.sparse is None:
            raise ConfigError("[score_blocks] segment.sparse: expected a SparsePlan, got None")
        rows = _query_rows("score_blocks", segment, q)
        step = self._step(segment, layer)
        out = np.empty((q.shape[1], self._engine.score_stride(step)), np.float32)
        heads = segment.pages.shape[2]
        self._check_finite("score_blocks", self._engine.score(step, layer, rows, heads, scale, out))
        end = segment.start + segment.q_len
        return np.ascontiguousarray(out[:, : -(-end // segment.sparse.block_size)])

    def select(self, segment: Segment, layer: int, q: F32, *, scale: float) -> BlockLists | None:
        """Blocks to read (selection.md sections 3, 4, 6); None where everything runs exactly."""
        if segment.sparse is None:
            return None
        rows = _query_rows("select", segment, q)
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
        rows = _query_rows("attend", segment, q)
        heads = segment.pages.shape[2]
        if lists is None:
            tiles = _num_tiles(segment)
            form: tuple[Any, ...] = (heads, tiles, [-1] * (heads * tiles), [])
        else:
            form = _checked_lists(segment, lists, q.shape[1])
        out = np.empty_like(rows)
        ok = self._engine.attend(self._step(segment, layer), layer, rows, heads, scale, *form, out)
        self._check_finite("attend", ok)
        return out

    # -- the whole layer ---------------------------------------------------------------------

    def build_layer(self, shape: LayerShape, weights: LayerWeights) -> Any:
        """Check that the matrices fit the shape, and hand both to the core."""
        _check_layer(shape, weights)
        tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
        numbers = {field.name: getattr(shape, field.name) for field in fields(shape)}
        return _module().Layer(**numbers, tensors=tensors)

    def begin_step(self, segments: Sequence[Segment], cos: F32, sin: F32) -> Any:
        """Prepare a step over `segments`; cos, sin f32 ``[T, rope_dim/2]`` for all their rows."""
        rows = sum(segment.q_len for segment in segments)
        check_f32("begin_step", "cos", cos, (rows, None))
        check_f32("begin_step", "sin", sin, cos.shape)
        step = _module().Step(cos, sin)
        for segment in segments:
            step.add_segment(_segment_fields(segment))
        return step

    def run_layer(self, layer: Any, index: int, hidden: F32, step: Any) -> None:
        """Run one decoder layer on hidden f32 ``[T, W]``, in place.

        Raises
        ------
        NumericalError
            if NaN or infinity reached the queries, keys or values
        """
        check_f32("run_layer", "hidden", hidden, (step.rows, None))
        if not self._engine.run_layer(layer, index, hidden, step):
            raise NumericalError(
                f"[run_layer] layer {index}: expected finite queries, keys and values, got NaN or "
                "infinity"
            )

    def step_stats(self, step: Any) -> StepStats:
        """Times and counts of the layers run so far."""
        dense, attention, select, *pairs = step.counts()
        return StepStats(
            dense_ns=dense,
            attention_ns=attention,
            select_ns=select,
            segments=[
                SegmentStats(pairs_attended=pairs[i], pairs_causal=pairs[i + 1])
                for i in range(0, len(pairs), 2)
            ],
        )

    def _step(self, segment: Segment, layer: int) -> Any:
        if not 0 <= layer < segment.pages.shape[0]:
            raise ShapeError(
                f"[Segment] layer: expected 0 to {segment.pages.shape[0] - 1}, got {layer}"
            )
        nothing = np.zeros((segment.q_len, 1), np.float32)  # these steps do not rotate
        return self.begin_step([segment], nothing, nothing)

    @staticmethod
    def _check_finite(function: str, ok: bool) -> None:
        if not ok:
            raise NumericalError(f"[{function}] q: expected finite values, got NaN or infinity")


# -- checks --------------------------------------------------------------------------------


def _default_kind(source: WeightSource) -> WeightKind:
    return "q4" if source.format in ("q4_0", "q4_1") else "q8"


def _check_multiple(function: str, name: str, value: int, factor: int) -> None:
    if value % factor:
        raise ShapeError(f"[{function}] {name}: expected a multiple of {factor}, got {value}")


def _check_source(source: WeightSource, kind: str) -> None:
    _check_multiple("pack_weight", "cols", source.cols, GROUP)
    allowed = {"f32": ("q8", "f32"), "q4_0": ("q4",), "q4_1": ("q4",), "q8_0": ("q8",)}
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


def _check_layer(shape: LayerShape, weights: LayerWeights) -> None:
    if not 0 < shape.head_dim <= MAX_HEAD_DIM or shape.head_dim % 16:
        raise ConfigError(
            f"[build_layer] head_dim: expected a multiple of 16 up to {MAX_HEAD_DIM}, got "
            f"{shape.head_dim}"
        )
    if shape.num_kv_heads <= 0 or shape.num_q_heads % shape.num_kv_heads:
        raise ConfigError(
            f"[build_layer] num_q_heads: expected a multiple of num_kv_heads={shape.num_kv_heads}, "
            f"got {shape.num_q_heads}"
        )
    width, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    wanted = {
        "q_proj": (q, width),
        "k_proj": (kv, width),
        "v_proj": (kv, width),
        "o_proj": (width, q),
        "gate_proj": (inner, width),
        "up_proj": (inner, width),
        "down_proj": (width, inner),
    }
    for name, want in wanted.items():
        weight = getattr(weights, name)
        if (weight.rows, weight.cols) != want:
            raise ShapeError(
                f"[build_layer] {name}: expected {want}, got {(weight.rows, weight.cols)}"
            )
    for name in ("attn_norm", "ffn_norm"):
        check_f32("build_layer", name, getattr(weights, name), (width,))


def _num_tiles(segment: Segment) -> int:
    if not segment.is_prefill:
        return 1
    return (segment.start + segment.q_len - 1) // BLOCK_SIZE - segment.start // BLOCK_SIZE + 1


def _query_rows(function: str, segment: Segment, q: F32) -> F32:
    """A private copy of q ``[Tq, Hq, D]``: the core scales it in place."""
    check_f32(function, "q", q, (segment.q_len, None, segment.layout.head_dim))
    heads = segment.pages.shape[2]
    if not q.shape[1] or q.shape[1] % heads:
        raise ShapeError(
            f"[{function}] q: expected a multiple of Hkv={heads} query heads, got {q.shape[1]}"
        )
    return q.copy()


def _segment_fields(segment: Segment) -> dict[str, Any]:
    """The values of a Segment as the core takes them; every bound it relies on is checked here."""
    layout, end = segment.layout, segment.start + segment.q_len
    _check_pages(segment, end)
    result: dict[str, Any] = {
        "start": segment.start,
        "q_len": segment.q_len,
        "is_prefill": segment.is_prefill,
        "is_sparse": segment.sparse is not None,
        "k_type": layout.k_type,
        "v_type": layout.v_type,
        "head_dim": layout.head_dim,
        "k_scale_offset": layout.k_scale_offset,
        "v_offset": layout.v_offset,
        "v_scale_offset": layout.v_scale_offset,
        "page_bytes": layout.page_bytes,
        "num_kv_heads": segment.pages.shape[2],
        "pages": segment.pages,
        "layer_page_bytes": segment.pages.strides[0],
        "block_table": segment.block_table,
        "index": None,
        "importance": None,
        "importance_tokens": 0,
        "record_importance": False,
    }
    if segment.sparse is not None:
        plan = segment.sparse
        result |= {
            "probe": plan.selector == "probe",
            "k": plan.k,
            "block_size": plan.block_size,
            "num_probes": plan.num_probes,
            "share_group": plan.share == "group",
            "exact_from_tile": plan.exact_from_tile,
        }
    if segment.index is not None:
        result |= _index_fields(segment, end)
    if segment.importance is not None:
        importance = segment.importance
        if importance.dtype != np.int64 or importance.ndim != 2 or importance.shape[1] < end:
            raise ShapeError(
                f"[Segment] importance: expected int64 [L, >= {end}], got {importance.dtype} "
                f"{importance.shape}"
            )
        result |= {
            "importance": importance,
            "importance_tokens": importance.shape[1],
            "record_importance": segment.record_importance and segment.is_prefill,
        }
    return result


def _check_pages(segment: Segment, end: int) -> None:
    pages, table = segment.pages, segment.block_table
    if segment.start < 0 or segment.q_len < 1 or (not segment.is_prefill and segment.q_len != 1):
        raise ShapeError(
            "[Segment] start, q_len: expected start >= 0 and at least one row (exactly one in "
            f"decode), got {segment.start}, {segment.q_len}"
        )
    if pages.dtype != np.uint8 or pages.ndim != 4 or pages.shape[3] != segment.layout.page_bytes:
        raise ShapeError(
            f"[Segment] pages: expected uint8 [L, *, Hkv, {segment.layout.page_bytes}], got "
            f"{pages.dtype} {pages.shape}"
        )
    needed = -(-end // BLOCK_SIZE)
    used = table[:needed]
    if (
        table.dtype != np.int32
        or len(used) < needed
        or used.min() < 0
        or used.max() >= pages.shape[1]
    ):
        raise ShapeError(
            f"[Segment] block_table: expected {needed} int32 pages below {pages.shape[1]}, got "
            f"{table.dtype} {table.tolist()[:8]}"
        )


def _index_fields(segment: Segment, end: int) -> dict[str, Any]:
    layout, index = segment.index_layout, segment.index
    if layout is None or index is None or segment.layout.k_type != "q8_0":
        raise ConfigError("[Segment] index: expected an index_layout and q8_0 keys beside it")
    plan = segment.sparse
    if plan is not None and (plan.block_size, plan.num_probes) != (
        layout.block_size,
        layout.num_probes,
    ):
        raise ConfigError(
            f"[Segment] index: expected one for blocks of {plan.block_size} and {plan.num_probes} "
            f"probes, got {layout.block_size} and {layout.num_probes}"
        )
    shape = (segment.pages.shape[0], segment.pages.shape[2], layout.record_bytes)
    got = (index.shape[0], index.shape[2], index.shape[3]) if index.ndim == 4 else None
    if index.dtype != np.uint8 or got != shape or index.shape[1] < layout.num_groups(end):
        raise ShapeError(
            f"[Segment] index: expected uint8 [{shape[0]}, >= {layout.num_groups(end)}, "
            f"{shape[1]}, {shape[2]}], got {index.dtype} {index.shape}"
        )
    return {
        "index": index,
        "layer_index_bytes": index.strides[0],
        "index_block": layout.block_size,
        "index_step": layout.step,
        "index_entries": layout.entries,
    }


def _block_lists(segment: Segment, found: tuple[int, int, list[int], list[int]]) -> BlockLists:
    """CSR lists from the core's, exact tiles (length -1) written out as all their causal blocks."""
    num_heads, num_tiles, lengths, blocks = found
    rows, next_block, first = [], 0, segment.start // BLOCK_SIZE
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


def _checked_lists(segment: Segment, lists: BlockLists, num_q_heads: int) -> tuple[Any, ...]:
    heads, tiles = segment.pages.shape[2], _num_tiles(segment)
    allowed = (heads,) if segment.is_prefill else (heads, num_q_heads)
    lengths = np.diff(lists.indptr)
    blocks = -(-(segment.start + segment.q_len) // BLOCK_SIZE)
    ok = (
        lists.num_heads in allowed
        and lists.num_tiles == tiles
        and len(lengths) == lists.num_heads * tiles
        and int(lists.indptr[-1]) == len(lists.indices)
        and bool(np.all(lengths > 0))
        and bool(np.all((lists.indices >= 0) & (lists.indices < blocks)))
    )
    if not ok:
        raise ShapeError(
            f"[attend] lists: expected {' or '.join(map(str, allowed))} heads x {tiles} tiles of "
            f"non-empty lists of blocks below {blocks}, got {lists.num_heads} x {lists.num_tiles}"
        )
    return lists.num_heads, tiles, lengths.tolist(), lists.indices.tolist()
