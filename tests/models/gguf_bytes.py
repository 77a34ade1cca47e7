"""Builds GGUF files byte by byte, right or wrong on purpose; knows nothing of our reader."""

import struct
from collections.abc import Sequence
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f",
    BOOL: "B", U64: "Q", I64: "q", F64: "d",
}  # fmt: skip


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def key(name: str | bytes, kind: int, value: Any) -> bytes:
    return text(name) + struct.pack("<I", kind) + scalar(kind, value)


def array(name: str, kind: int, values: Sequence[Any], *, count: int | None = None) -> bytes:
    head = struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count)
    return text(name) + head + b"".join(scalar(kind, value) for value in values)


def tensor(
    name: str | bytes,
    sizes: Sequence[int],
    *,
    kind: int = 0,
    offset: int = 0,
    dims: int | None = None,
) -> bytes:
    """An entry of the tensor table; `sizes` fastest first, as in the file; kind 0 is F32."""
    return (
        text(name)
        + struct.pack("<I", len(sizes) if dims is None else dims)
        + b"".join(struct.pack("<Q", size & (2**64 - 1)) for size in sizes)
        + struct.pack("<IQ", kind, offset)
    )


def gguf_file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    data: bytes = b"",
    alignment: int = 32,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    head = magic + version
    head += struct.pack("<Q", len(tensors) if num_tensors is None else num_tensors)
    head += struct.pack("<Q", len(keys) if num_keys is None else num_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data
