"""Pages of the cache and records of the selector index: numbers in, bytes out, and back.

`kvsieve.kernels.layout` says where each byte lies; here every table of that description is one
NumPy view with named axes. Slots that no token was written to hold whatever the page held
before, which may be NaN: readers blank them before they compute anything.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsieve.kernels.backend import Segment
from kvsieve.kernels.layout import (
    GROUP,
    LANES,
    NUM_BANDS,
    AnchorLayout,
    IndexLayout,
    PageLayout,
    VectorLayout,
)
from kvsieve.kernels.reference.quantize import Rows, quantize_rows
from kvsieve.types import BLOCK_SIZE, F32, I32, I64, U8, AnyArray, CacheType

U8_ZERO = 128
"""A signed byte is stored plus this where the instruction wants unsigned operands."""

NIBBLE_ZERO = 8
"""A q4_0 code (-8..7) is stored plus this."""


# -- writing ------------------------------------------------------------------------------------
def append(segment: Segment, layer: int, k: F32, v: F32) -> None:
    """Write the keys and values of a segment's rows into its pages and its index.

    Everything is checked and quantised before the first byte changes.

    Parameters
    ----------
    k, v : f32 ``[Tq, Hkv, D]``, keys after rope; row ``t`` goes to position ``start + t``

    Raises
    ------
    NumericalError
        k or v holds NaN or infinity, or a value that does not fit the cache type.
    """
    layout = segment.layout
    keys = quantize_rows(k, layout.k_type, function="append", name="k")
    values = quantize_rows(v, layout.v_type, function="append", name="v")
    for row in range(segment.q_len):
        block, slot = divmod(segment.start + row, BLOCK_SIZE)
        page = segment.pages[layer, segment.block_table[block]]
        _write_key(page, layout, slot, keys.take(row))
        _write_value(page, layout, slot, values.take(row))
        if segment.index is not None and isinstance(segment.index_layout, IndexLayout):
            _write_index(
                segment.index[layer], segment.index_layout, segment.start + row, keys.take(row)
            )


def _write_key(page: U8, layout: PageLayout, slot: int, key: Rows) -> None:
    """One token's keys ``[Hkv, D]`` into ``page [Hkv, page_bytes]``."""
    stored = _key_view(page, layout)
    if layout.k_type in ("f32", "f16"):
        stored[:, :, slot] = key.values
        return
    stored[:, :, slot, :] = _key_bytes(key.values, layout.k_type)
    _scale_view(page, layout.k_scale_offset, layout.k_type, layout.head_dim)[:, :, slot] = (
        key.scales
    )


def _write_value(page: U8, layout: PageLayout, slot: int, value: Rows) -> None:
    """One token's values ``[Hkv, D]`` into ``page [Hkv, page_bytes]``."""
    stored = _value_view(page, layout)
    if layout.v_type in ("f32", "f16"):
        stored[:, slot, :] = value.values
        return
    group, lane = divmod(slot, 4)
    if layout.v_type == "q8_0":
        stored[:, group, :, lane] = value.values
    else:
        # Two tokens share a byte: keep the other one's half.
        code = (value.values + NIBBLE_ZERO).astype(np.uint8)
        half = stored[:, group % 4, :, lane]
        half[...] = (half & 0xF0) | code if group < 4 else (half & 0x0F) | (code << 4)
    _scale_view(page, layout.v_scale_offset, layout.v_type, layout.head_dim)[:, :, slot] = (
        value.scales
    )


def _write_index(index: U8, layout: IndexLayout, position: int, key: Rows) -> None:
    """One token's q8_0 keys into ``index [groups, Hkv, record_bytes]``, if it is a sampled one."""
    block, offset = divmod(position, layout.block_size)
    entry, between = divmod(offset, layout.step)
    if between:
        return
    group, lane = divmod(block, LANES)
    codes, scales = index_views(index[group], layout)
    codes[:, entry, :, lane, :] = _key_bytes(key.values, "q8_0")
    scales[:, entry, lane] = key.scales[:, 0] if key.scales is not None else 0


def _key_bytes(values: AnyArray, cache_type: CacheType) -> U8:
    """Codes ``i8 [Hkv, D]`` to stored bytes ``[Hkv, D/4 or D/8, 4]``."""
    chunks = values.reshape(len(values), -1, 4).astype(np.int16)
    if cache_type == "q8_0":
        return (chunks + U8_ZERO).astype(np.uint8)
    codes: U8 = (chunks + NIBBLE_ZERO).astype(np.uint8)
    half = codes.shape[1] // 2
    packed: U8 = codes[:, :half] | (codes[:, half:] << np.uint8(4))
    return packed


# -- reading ------------------------------------------------------------------------------------
def read_keys(segment: Segment, layer: int, kv_head: int, blocks: I32 | I64) -> Rows:
    """Keys of the listed blocks, 32 rows each, in the order of the list.

    Returns
    -------
    Rows ``[32 * len(blocks), D]``; slots past the segment's last token are zero.
    """
    layout, pages = segment.layout, _pages_of(segment, layer, kv_head, blocks)
    stored = _key_view(pages, layout)
    if layout.k_type in ("f32", "f16"):
        values = np.swapaxes(stored, -1, -2).astype(np.float32)
        return _blank_unwritten(segment, blocks, values, None)
    codes: AnyArray
    if layout.k_type == "q8_0":
        codes = (stored.astype(np.int16) - U8_ZERO).astype(np.int8)
    else:
        codes = _nibbles(stored)
    values = np.swapaxes(codes, -2, -3)  # [N, D/4, 32, 4] -> [N, 32, D/4, 4]
    scales = _scale_view(pages, layout.k_scale_offset, layout.k_type, layout.head_dim)
    return _blank_unwritten(segment, blocks, values, np.swapaxes(scales, -1, -2))


def read_values(segment: Segment, layer: int, kv_head: int, blocks: I32 | I64) -> Rows:
    """Values of the listed blocks; as `read_keys`."""
    layout, pages = segment.layout, _pages_of(segment, layer, kv_head, blocks)
    stored = _value_view(pages, layout)
    if layout.v_type in ("f32", "f16"):
        return _blank_unwritten(segment, blocks, stored.astype(np.float32), None)
    codes = stored if layout.v_type == "q8_0" else _nibbles(stored)
    values = np.swapaxes(codes, -1, -2)  # [N, 8, D, 4] -> [N, 8, 4, D]
    scales = _scale_view(pages, layout.v_scale_offset, layout.v_type, layout.head_dim)
    return _blank_unwritten(segment, blocks, values, np.swapaxes(scales, -1, -2))


def block_positions(blocks: I32 | I64) -> I64:
    """Position of every slot of the listed blocks: i64 ``[32 * len(blocks)]``."""
    starts = np.asarray(blocks, dtype=np.int64)[:, None] * BLOCK_SIZE
    return (starts + np.arange(BLOCK_SIZE)).ravel()


def tiles(segment: Segment) -> Iterator[tuple[int, slice]]:
    """The blocks that a segment's rows lie in, each with the slice of rows that lies in it."""
    end = segment.start + segment.q_len
    for tile in range(segment.start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
        first = max(segment.start, tile * BLOCK_SIZE)
        last = min(end, (tile + 1) * BLOCK_SIZE)
        yield tile, slice(first - segment.start, last - segment.start)


def _pages_of(segment: Segment, layer: int, kv_head: int, blocks: I32 | I64) -> U8:
    pages: U8 = segment.pages[layer, segment.block_table[blocks], kv_head]
    return pages


def _blank_unwritten(
    segment: Segment, blocks: I32 | I64, values: AnyArray, scales: F32 | None
) -> Rows:
    unwritten = block_positions(blocks) >= segment.start + segment.q_len
    rows = np.array(values).reshape(len(unwritten), segment.layout.head_dim)
    rows[unwritten] = 0
    if scales is None:
        return Rows(values=rows, scales=None)
    row_scales = np.array(scales).reshape(len(unwritten), -1)
    row_scales[unwritten] = 0
    return Rows(values=rows, scales=row_scales)


def _nibbles(stored: U8) -> AnyArray:
    """Low halves, then high halves, along the third axis from the end; as signed codes."""
    codes: AnyArray = np.concatenate([stored & 0x0F, stored >> 4], axis=-3)
    return (codes.astype(np.int8) - NIBBLE_ZERO).astype(np.int8)


# -- views: the tables of `kvsieve.kernels.layout`, one by one ------------------------------------
def _key_view(page: U8, layout: PageLayout) -> AnyArray:
    d = layout.head_dim
    dtype, shape = {
        "q8_0": (np.uint8, (d // 4, BLOCK_SIZE, 4)),
        "q4_0": (np.uint8, (d // 8, BLOCK_SIZE, 4)),
        "f16": (np.float16, (d, BLOCK_SIZE)),
        "f32": (np.float32, (d, BLOCK_SIZE)),
    }[layout.k_type]
    return _view(page, layout.k_offset, dtype, shape)


def _value_view(page: U8, layout: PageLayout) -> AnyArray:
    d = layout.head_dim
    dtype, shape = {
        "q8_0": (np.int8, (8, d, 4)),
        "q4_0": (np.uint8, (4, d, 4)),
        "f16": (np.float16, (BLOCK_SIZE, d)),
        "f32": (np.float32, (BLOCK_SIZE, d)),
    }[layout.v_type]
    return _view(page, layout.v_offset, dtype, shape)


def _scale_view(page: U8, offset: int, cache_type: CacheType, head_dim: int) -> F32:
    """``f32 [..., groups, 32]``."""
    groups = head_dim // GROUP if cache_type == "q4_0" else 1
    return _view(page, offset, np.float32, (groups, BLOCK_SIZE))


def index_views(records: U8, layout: IndexLayout | VectorLayout) -> tuple[U8, F32]:
    """Codes ``u8 [..., entries, D/4, 16, 4]`` and scales ``f32 [..., entries, 16]`` of records."""
    shape = (layout.entries, layout.head_dim // 4, LANES, 4)
    codes = _view(records, 0, np.uint8, shape)
    return codes, _view(records, math.prod(shape), np.float32, (layout.entries, LANES))


def record_views(records: U8, layout: AnchorLayout) -> tuple[U8, F32, F32]:
    """Codes ``u8 [..., vectors, D/4, 16, 4]``, scales ``f32 [..., vectors, 16]`` and spreads ``f32
    [..., NUM_BANDS, 16]`` of records of anchors.
    """
    shape = (layout.vectors, layout.head_dim // 4, LANES, 4)
    scales = math.prod(shape)
    spreads = scales + 4 * layout.vectors * LANES
    return (
        _view(records, 0, np.uint8, shape),
        _view(records, scales, np.float32, (layout.vectors, LANES)),
        _view(records, spreads, np.float32, (NUM_BANDS, LANES)),
    )


def _view(page: U8, offset: int, dtype: Any, shape: tuple[int, ...]) -> AnyArray:
    """Bytes from `offset` on the last axis as an array; splitting an axis never copies."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    section: AnyArray = page[..., offset : offset + num_bytes].view(dtype)
    return section.reshape(*page.shape[:-1], *shape)
