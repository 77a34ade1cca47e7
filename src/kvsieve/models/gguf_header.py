"""The header of a GGUF file: metadata and the table of tensors, read with every bound checked.

The header is untrusted. Every count, length and offset is compared with the bytes that are left,
by subtraction, before anything is allocated for it; a wrong file gives one `ModelFileError` that
names the file, the key or tensor, what was expected and what came.

Layout, little endian: magic, u32 version, u64 number of tensors, u64 number of keys; each key as
``string, u32 type, value``; each tensor as ``string, u32 dims, u64 sizes (fastest first), u32
type, u64 offset``; padding up to the alignment; the tensors' data. A string is a u64 length and
UTF-8 bytes; an array is a u32 element type, a u64 count and the elements.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from kvsieve.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 64
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 65536

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Tensor types by id: name, values per block, bytes per block. Which of them can be *used* is
for `models.weights` to say; here they only have to be measured."""

# Scalar value types by id. 7 (bool), 8 (string) and 9 (array) are read by code of their own.
_SCALARS: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9

# The fewest bytes that one entry can take, to bound counts by the bytes that are left:
# key: length, one byte of name, type, one byte of value. tensor: length, name, dims, one size,
# type, offset. string: its length.
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_STRING_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is in NumPy order (slowest first); ``offset`` counts from
    the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """What `read_header` found. ``data_start`` is where the tensors' data begins."""

    version: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    header_bytes: int
    data_start: int


class _Cursor:
    """A position in bounded bytes; every read says what it is for, so that errors can."""

    def __init__(self, data: bytes | mmap.mmap, source: str) -> None:
        self.data = data
        self.source = source
        self.end = len(data)
        self.pos = 0

    @property
    def left(self) -> int:
        return self.end - self.pos

    def error(self, what: str, expected: str, got: object) -> ModelFileError:
        return ModelFileError(f"[GgufFile] {self.source}: {what}: expected {expected}, got {got}")

    def take(self, size: int, what: str) -> bytes:
        if size > self.left:
            raise self.error(
                what, f"{size} bytes at offset {self.pos}", f"{self.left} (the file is truncated)"
            )
        start = self.pos
        self.pos += size
        return self.data[start : self.pos]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, entry_bytes: int) -> int:
        """A u64 count of entries that take at least `entry_bytes` each."""
        count = self.u64(what)
        if count > self.left // entry_bytes:
            raise self.error(
                what, f"at most {self.left // entry_bytes} (for {self.left} bytes left)", count
            )
        return count

    def text(self, what: str, *, max_bytes: int | None = None) -> str:
        length = self.u64(f"length of {what}")
        limit = self.left if max_bytes is None else min(self.left, max_bytes)
        if length > limit:
            raise self.error(f"length of {what}", f"at most {limit} bytes", length)
        return self._decode(self.take(length, what), what)

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings. The one hot loop of the reader (a vocabulary has 10**5 of them)."""
        data, end, pos = self.data, self.end, self.pos
        unpack = _STRING_LENGTH.unpack_from
        found: list[str] = []
        append = found.append
        try:
            for _ in range(count):
                (length,) = unpack(data, pos)
                pos += 8
                if length > end - pos:
                    raise self.error(
                        f"length of entry {len(found)} of {what}",
                        f"at most {end - pos} bytes",
                        length,
                    )
                stop = pos + length
                append(str(data[pos:stop], "utf-8"))
                pos = stop
        except struct.error:
            raise self.error(
                f"entry {len(found)} of {what}", "8 bytes of length", f"{end - pos}"
            ) from None
        except UnicodeDecodeError as failure:
            raise self.error(f"entry {len(found)} of {what}", "UTF-8", failure) from None
        self.pos = pos
        return found

    def _decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as failure:
            raise self.error(what, "UTF-8", failure) from None


def read_header(data: bytes | mmap.mmap, *, source: str) -> Header:
    """Parse and check the header of a whole GGUF file.

    `source` names the file in errors. Arrays of numbers come as read-only NumPy arrays of the
    file's type, arrays of strings as ``list[str]``, scalars as int, float, bool and str.
    Every tensor of the result lies inside `data` and overlaps no other.
    """
    cursor = _Cursor(data, source)
    version = _read_preamble(cursor)
    num_tensors = cursor.count("number of tensors", _MIN_TENSOR_BYTES)
    num_keys = cursor.count("number of keys", _MIN_KEY_BYTES)
    metadata: dict[str, Any] = {}
    alignment = DEFAULT_ALIGNMENT
    for _ in range(num_keys):
        key = cursor.text("a key", max_bytes=MAX_KEY_BYTES)
        if not key:
            raise cursor.error("a key", "a name", "an empty string")
        if key in metadata:
            raise cursor.error(f"key {key!r}", "it once", "it twice")
        value_type = cursor.u32(f"type of {key!r}")
        metadata[key] = _read_value(cursor, key, value_type)
        if key == "general.alignment":
            alignment = _check_alignment(cursor, value_type, metadata[key])
    entries = [_read_tensor(cursor) for _ in range(num_tensors)]
    header_bytes = cursor.pos
    data_start = -(-header_bytes // alignment) * alignment
    return Header(
        version=version,
        alignment=alignment,
        metadata=MappingProxyType(metadata),
        tensors=MappingProxyType(
            _place_tensors(cursor, entries, alignment=alignment, data_start=data_start)
        ),
        header_bytes=header_bytes,
        data_start=data_start,
    )


def _read_preamble(cursor: _Cursor) -> int:
    if cursor.end < len(MAGIC) or cursor.data[: len(MAGIC)] != MAGIC:
        start = cursor.data[: len(MAGIC)]
        raise cursor.error(
            "first bytes", f"a GGUF file ({MAGIC!r})", repr(start) if start else "an empty file"
        )
    cursor.pos = len(MAGIC)
    version = cursor.u32("version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        got = f"big-endian {swapped}" if swapped in VERSIONS else version
        raise cursor.error("version", " or ".join(map(str, VERSIONS)), got)
    return version


def _read_value(cursor: _Cursor, key: str, value_type: int) -> Any:
    what = f"value of {key!r}"
    if value_type == _STRING:
        return cursor.text(what)
    if value_type == _BOOL:
        byte = cursor.take(1, what)[0]
        if byte > 1:
            raise cursor.error(what, "0 or 1 for a bool", byte)
        return bool(byte)
    if value_type == _ARRAY:
        return _read_array(cursor, what)
    if value_type in _SCALARS:
        dtype = np.dtype(_SCALARS[value_type])
        return np.frombuffer(cursor.take(dtype.itemsize, what), dtype)[0].item()
    raise cursor.error(f"type of {key!r}", "a value type from 0 to 12", value_type)


def _read_array(cursor: _Cursor, what: str) -> Any:
    element = cursor.u32(f"element type of {what}")
    if element == _STRING:
        return cursor.texts(cursor.count(f"length of {what}", _STRING_LENGTH.size), what)
    if element != _BOOL and element not in _SCALARS:
        got = "an array inside an array" if element == _ARRAY else element
        raise cursor.error(f"element type of {what}", "numbers, bools or strings", got)
    dtype = np.dtype("u1" if element == _BOOL else _SCALARS[element])
    count = cursor.count(f"length of {what}", dtype.itemsize)
    values = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    if element != _BOOL:
        return values
    if count and values.max() > 1:
        raise cursor.error(what, "0 or 1 for every bool", values.max())
    return values.view(np.bool_)


def _check_alignment(cursor: _Cursor, value_type: int, value: Any) -> int:
    power_of_two = value_type == _UINT32 and value > 0 and value & (value - 1) == 0
    if not power_of_two or not 8 <= value <= MAX_ALIGNMENT:
        raise cursor.error(
            "general.alignment",
            f"a u32 power of two from 8 to {MAX_ALIGNMENT}",
            f"{value!r} of value type {value_type}",
        )
    return int(value)


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    """One entry of the tensor table, its offset still relative to the data section."""
    name = cursor.text("a tensor name", max_bytes=MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    if not name:
        raise cursor.error("a tensor name", "a name", "an empty string")
    num_dims = cursor.u32(f"number of dimensions of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"number of dimensions of {what}", f"1 to {MAX_DIMS}", num_dims)
    sizes = [cursor.u64(f"sizes of {what}") for _ in range(num_dims)]
    type_id = cursor.u32(f"type of {what}")
    offset = cursor.u64(f"offset of {what}")
    if type_id not in GGML_TYPES:
        raise cursor.error(f"type of {what}", "a known tensor type", type_id)
    type_name, block_values, block_bytes = GGML_TYPES[type_id]
    if not all(0 < size < 2**63 for size in sizes):
        raise cursor.error(f"sizes of {what}", "positive numbers", sizes)
    if sizes[0] % block_values:
        raise cursor.error(f"row of {what}", f"a multiple of {block_values} values", sizes[0])
    nbytes = sizes[0] // block_values * block_bytes
    for size in sizes[1:]:
        nbytes *= size  # Python integers: a product too large for the file is seen as such
    return TensorInfo(
        name=name, shape=tuple(reversed(sizes)), ggml_type=type_name, offset=offset, nbytes=nbytes
    )


def _place_tensors(
    cursor: _Cursor, entries: list[TensorInfo], *, alignment: int, data_start: int
) -> dict[str, TensorInfo]:
    data_bytes = max(0, cursor.end - data_start)
    placed: dict[str, TensorInfo] = {}
    for entry in entries:
        what = f"tensor {entry.name!r}"
        if entry.name in placed:
            raise cursor.error(what, "it once", "it twice")
        if entry.offset % alignment:
            raise cursor.error(f"offset of {what}", f"a multiple of {alignment}", entry.offset)
        if entry.offset > data_bytes or entry.nbytes > data_bytes - entry.offset:
            raise cursor.error(
                what,
                f"{entry.nbytes} bytes at offset {entry.offset} of the data",
                f"{data_bytes} bytes of data (the file is truncated, or the header is wrong)",
            )
        placed[entry.name] = replace(entry, offset=data_start + entry.offset)
    by_offset = sorted(placed.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(by_offset):
        if after.offset - before.offset < before.nbytes:
            raise cursor.error(
                f"tensor {after.name!r}",
                f"an offset after the end of {before.name!r}",
                f"an overlap of {before.nbytes - (after.offset - before.offset)} bytes",
            )
    return placed
