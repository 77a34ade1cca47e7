"""Checks that both backends make before anything is written, so that they refuse alike."""

from typing import get_args

import numpy as np

from kvsieve.errors import ConfigError, ShapeError
from kvsieve.kernels.backend import BlockLists, Gate, LayerShape, LayerWeights, Segment
from kvsieve.kernels.layout import IndexLayout, summary_layout
from kvsieve.types import BLOCK_SIZE, F32, I32, AnyArray


def check_f32(function: str, name: str, array: AnyArray, shape: tuple[int | None, ...]) -> None:
    """Raise ShapeError unless `array` is C-contiguous float32 of `shape` (None: any length)."""
    ok = (
        isinstance(array, np.ndarray)
        and array.dtype == np.float32
        and array.flags.c_contiguous
        and array.ndim == len(shape)
        and all(want is None or want == got for want, got in zip(shape, array.shape, strict=True))
    )
    if not ok:
        want = ", ".join("*" if n is None else str(n) for n in shape)
        got = (
            f"{array.dtype} {array.shape}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise ShapeError(f"[{function}] {name}: expected C-contiguous float32 ({want}), got {got}")


def check_kept(kept: I32 | None, *, num_rows: int) -> None:
    """Rows of a step that are needed after a layer: None, or i32, ascending, each once."""
    if kept is None:
        return
    if kept.dtype != np.int32 or kept.ndim != 1:
        raise ShapeError(f"[run_layer] kept: expected int32 [N], got {kept.dtype} {kept.shape}")
    if len(kept) and (kept[0] < 0 or kept[-1] >= num_rows or (np.diff(kept) <= 0).any()):
        raise ShapeError(
            f"[run_layer] kept: expected ascending rows below {num_rows}, got {kept.tolist()}"
        )


def count_tiles(segment: Segment) -> int:
    """Blocks of 32 positions that the segment's rows lie in."""
    end = segment.start + segment.q_len
    return -(-end // BLOCK_SIZE) - segment.start // BLOCK_SIZE


def check_segment(function: str, segment: Segment) -> None:
    """Raise ShapeError unless a segment's arrays have room for its tokens."""
    end = segment.start + segment.q_len
    num_blocks = -(-end // BLOCK_SIZE)
    pages, table, page_bytes = segment.pages, segment.block_table, segment.layout.page_bytes
    if segment.start < 0 or segment.q_len < 1:
        raise ShapeError(
            f"[{function}] segment: expected start >= 0 and q_len >= 1, "
            f"got {segment.start} and {segment.q_len}"
        )
    if pages.dtype != np.uint8 or pages.ndim != 4 or pages.shape[3] != page_bytes:
        raise ShapeError(
            f"[{function}] segment.pages: expected uint8 (*, *, *, {page_bytes}), "
            f"got {pages.dtype} {pages.shape}"
        )
    used = table[:num_blocks]
    if table.dtype != np.int32 or table.ndim != 1 or len(used) < num_blocks:
        raise ShapeError(
            f"[{function}] segment.block_table: expected int32 of at least {num_blocks} blocks "
            f"for {end} tokens, got {table.dtype} {table.shape}"
        )
    if used.min() < 0 or used.max() >= pages.shape[1]:
        raise ShapeError(
            f"[{function}] segment.block_table: expected pages 0 to {pages.shape[1] - 1}, "
            f"got {used.min()} to {used.max()}"
        )
    _check_extras(function, segment, end)


def _check_extras(function: str, segment: Segment, end: int) -> None:
    """The importance and index arrays, where there are any."""
    importance, index, layout = segment.importance, segment.index, segment.index_layout
    if importance is not None and (
        importance.dtype != np.int64 or importance.ndim != 2 or importance.shape[1] < end
    ):
        raise ShapeError(
            f"[{function}] segment.importance: expected int64 (*, >= {end}), "
            f"got {importance.dtype} {importance.shape}"
        )
    plan = segment.sparse
    if plan is not None and plan.rule is not None:
        raise ConfigError(
            f"[{function}] segment.sparse: expected a selector of the kernels, got a rule in Python"
        )
    if plan is not None and (function == "score_blocks" or plan.decode_is_sparse(end)):
        needed = summary_layout(plan.selector, head_dim=segment.layout.head_dim)
        if needed is not None and (index is None or layout != needed):
            got = "none" if index is None or layout is None else str(layout)
            raise ConfigError(
                f"[{function}] segment.index: expected one of {plan.selector}, got {got}"
            )
    if index is None:
        return
    needs_q8 = isinstance(layout, IndexLayout)
    if layout is None or (needs_q8 and segment.layout.k_type != "q8_0"):
        raise ShapeError(f"[{function}] segment.index: expected None without q8_0 keys and layout")
    room = (layout.num_groups(end), segment.pages.shape[2], layout.record_bytes)
    if (
        index.dtype != np.uint8
        or index.ndim != 4
        or index.shape[1] < room[0]
        or (index.shape[2:] != room[1:])
    ):
        raise ShapeError(
            f"[{function}] segment.index: expected uint8 (*, >= {room[0]}, {room[1]}, {room[2]}), "
            f"got {index.dtype} {index.shape}"
        )


def check_queries(function: str, segment: Segment, q: F32) -> None:
    """Raise ShapeError unless q is f32 ``[Tq, Hq, D]`` with whole groups of query heads."""
    check_f32(function, "q", q, (segment.q_len, None, segment.layout.head_dim))
    num_kv_heads = segment.pages.shape[2]
    if q.shape[1] < 1 or q.shape[1] % num_kv_heads:
        raise ShapeError(
            f"[{function}] q: expected a multiple of num_kv_heads={num_kv_heads} query heads, "
            f"got {q.shape[1]}"
        )


def check_lists(segment: Segment, lists: BlockLists, *, num_q_heads: int) -> None:
    """Raise ShapeError unless `lists` has one sorted, non-empty row per (head, tile)."""
    num_tiles = count_tiles(segment)
    num_blocks = -(-(segment.start + segment.q_len) // BLOCK_SIZE)
    num_kv_heads = segment.pages.shape[2]
    if lists.num_heads not in (num_kv_heads, num_q_heads) or lists.num_tiles != num_tiles:
        raise ShapeError(
            f"[attend] lists: expected {num_kv_heads} or {num_q_heads} heads of {num_tiles} tiles, "
            f"got {lists.num_heads} of {lists.num_tiles}"
        )
    indptr, indices = lists.indptr, lists.indices
    if len(indptr) != lists.num_heads * num_tiles + 1 or (np.diff(indptr) < 1).any():
        raise ShapeError("[attend] lists.indptr: expected at least one block in each row")
    if indptr[0] != 0 or indptr[-1] != len(indices):
        raise ShapeError(
            f"[attend] lists.indptr: expected 0 to {len(indices)}, got {indptr[0]} to {indptr[-1]}"
        )
    if indices.min() < 0 or indices.max() >= num_blocks:
        raise ShapeError(
            f"[attend] lists.indices: expected blocks 0 to {num_blocks - 1}, "
            f"got {indices.min()} to {indices.max()}"
        )
    rising = np.diff(indices) > 0
    rising[indptr[1:-1] - 1] = True  # where a new row begins
    if not rising.all():
        raise ShapeError("[attend] lists.indices: expected ascending, unique blocks in each row")
    own = np.arange(lists.num_heads * num_tiles) % num_tiles + segment.start // BLOCK_SIZE
    if segment.is_prefill and (indices[indptr[:-1]] > own).any():
        raise ShapeError("[attend] lists.indices: expected a visible token for every row")


def check_layer(shape: LayerShape, weights: LayerWeights) -> None:
    """Raise unless head counts divide, the rotation fits a head, and the matrices fit."""
    if shape.num_kv_heads < 1 or shape.num_q_heads % shape.num_kv_heads or shape.num_q_heads < 1:
        raise ConfigError(
            f"[build_layer] num_q_heads: expected a multiple of num_kv_heads="
            f"{shape.num_kv_heads}, got {shape.num_q_heads}"
        )
    if shape.rope_dim % 2 or not 0 <= shape.rope_dim <= shape.head_dim:
        raise ConfigError(
            f"[build_layer] rope_dim: expected an even number up to head_dim={shape.head_dim}, "
            f"got {shape.rope_dim}"
        )
    if shape.gate not in get_args(Gate):
        raise ConfigError(
            f"[build_layer] gate: expected one of {', '.join(get_args(Gate))}, got {shape.gate!r}"
        )
    if not 0 <= shape.window < 2**31:
        raise ConfigError(f"[build_layer] window: expected 0 tokens or more, got {shape.window}")
    for name, (rows, cols) in shape.matrix_shapes.items():
        weight = getattr(weights, name)
        if (weight.rows, weight.cols) != (rows, cols):
            raise ShapeError(
                f"[build_layer] {name}: expected ({rows}, {cols}), got ({weight.rows}, "
                f"{weight.cols})"
            )
    for name, length in shape.vector_lengths.items():
        vector = getattr(weights, name)
        if vector is not None or name in ("attn_norm", "ffn_norm"):
            check_f32("build_layer", name, vector, (length,))
