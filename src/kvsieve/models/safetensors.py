"""One safetensors file: its header, read with every bound checked, and each tensor's bytes.

Layout, little endian: u64 length of the header, the header as a JSON object, the tensors' bytes.
The header gives for each name a type, a shape, and where the bytes begin and end, counted from
the end of the header. It is untrusted: lengths are compared with the bytes there are before
anything is allocated for them. Bytes are read through a memory map, so that a tensor takes no
memory of its own until it is used, and BF16 needs no NumPy type of that name.
"""

import json
import math
import mmap
import os
import stat
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvsieve.errors import ModelFileError
from kvsieve.models.gguf_header import TensorInfo
from kvsieve.types import U8

MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8
_LENGTH_BYTES = 8

_TYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E5M2": 1, "F8_E4M3": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Types by name: bytes of a value. Which can be *used* is for `models.weights` to say."""


class SafetensorsFile:
    """A safetensors file, mapped read-only: `tensors`, and the bytes of each."""

    def __init__(self, path: Path, header: bytes, mapping: mmap.mmap) -> None:
        self.path = path
        self.header = header
        self.tensors = _read_tensors(path, header, num_bytes=len(mapping))
        self._mapping = mapping
        self._bytes: U8 | None = np.frombuffer(mapping, np.uint8)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "SafetensorsFile":
        """Map the file and check its whole header; `ModelFileError` if anything is wrong."""
        where = Path(path)
        mapping = map_file(where)
        try:
            return cls(where, _header(where, mapping), mapping)
        except BaseException:
            mapping.close()
            raise

    @property
    def file_bytes(self) -> int:
        """Size of the file when it was opened."""
        return len(self._view())

    def raw(self, name: str) -> U8:
        """Bytes of a tensor: a read-only view ``u8 [nbytes]`` of the mapping."""
        info = self.tensors[name]
        return self._view()[info.offset : info.offset + info.nbytes]

    def forget_pages(self) -> None:
        """Take what was read of the mapping out of this process's memory."""
        if hasattr(self._mapping, "madvise"):  # not on Windows
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Drop the mapping (now, or when the last array given out is gone)."""
        self._bytes = None
        try:
            self._mapping.close()
        except BufferError:
            return

    def _view(self) -> U8:
        if self._bytes is None:
            raise ModelFileError(
                f"[safetensors] {self.path}: expected an open file, got a closed one"
            )
        return self._bytes


def map_file(path: Path) -> mmap.mmap:
    """A read-only mapping of a regular, non-empty file."""
    try:
        # Looked at before it is opened: opening a pipe would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            _fail(path, "expected a regular file, got another kind")
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                _fail(path, "expected a safetensors file, got 0 bytes")
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        _fail(path, f"expected a readable file, got: {reason}")


def read_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file; `ModelFileError` names the file."""
    try:
        if path.stat().st_size > max_bytes:
            _fail(path, f"expected at most {max_bytes} bytes, got {path.stat().st_size}")
        return parse_object(path.read_bytes(), path, what="the file")
    except OSError as failure:
        _fail(path, f"expected a readable file, got: {failure.strerror}")


def parse_object(data: bytes, path: Path, *, what: str) -> dict[str, Any]:
    """A JSON object in which no name comes twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            # One pass: a header may have a million names.
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"{twice!r:.100} twice")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as failure:
        _fail(path, f"{what}: expected a JSON object, got: {failure}")
    if not isinstance(value, dict):
        _fail(path, f"{what}: expected a JSON object, got {value!r:.60}")
    return value


def _header(path: Path, mapping: mmap.mmap) -> bytes:
    if len(mapping) < _LENGTH_BYTES:
        _fail(path, f"expected a header, got {len(mapping)} bytes")
    length = int.from_bytes(mapping[:_LENGTH_BYTES], "little")
    left = len(mapping) - _LENGTH_BYTES
    if length > min(left, MAX_HEADER_BYTES):
        _fail(
            path,
            f"header: expected at most {min(left, MAX_HEADER_BYTES)} bytes, got {length} "
            "(truncated, or no safetensors file)",
        )
    return mapping[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _read_tensors(path: Path, header: bytes, *, num_bytes: int) -> Mapping[str, TensorInfo]:
    entries = parse_object(header, path, what="header")
    entries.pop("__metadata__", None)
    start = _LENGTH_BYTES + len(header)
    tensors = {
        name: _tensor(path, name, entry, start=start, room=num_bytes - start)
        for name, entry in entries.items()
    }
    for before, after in pairwise(sorted(tensors.values(), key=lambda one: one.offset)):
        if before.offset + before.nbytes > after.offset:
            _fail(
                path,
                f"tensor {after.name!r}: expected bytes of its own, got those of {before.name!r}",
            )
    return tensors


def _tensor(path: Path, name: str, entry: Any, *, start: int, room: int) -> TensorInfo:
    def check(ok: bool, expected: str, got: object) -> None:
        if not ok:
            _fail(path, f"tensor {name!r}: expected {expected}, got {got!r:.80}")

    check(isinstance(entry, dict), "an object", entry)
    kind, shape, place = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    check(isinstance(kind, str) and kind in _TYPE_BYTES, f"one of {', '.join(_TYPE_BYTES)}", kind)
    check(
        isinstance(shape, list)
        and len(shape) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < 1 << 48 for size in shape),
        "a shape",
        shape,
    )
    check(
        isinstance(place, list) and len(place) == 2 and all(type(at) is int for at in place),
        "two data_offsets",
        place,
    )
    begin, end = place
    check(0 <= begin <= end <= room, f"data_offsets within the {room} bytes of data", place)
    size = math.prod(shape) * _TYPE_BYTES[kind]
    check(end - begin == size, f"{size} bytes for {kind} {shape}", end - begin)
    return TensorInfo(
        name=name, shape=tuple(shape), ggml_type=kind, offset=start + begin, nbytes=size
    )


def _fail(path: Path, message: str) -> NoReturn:
    raise ModelFileError(f"[safetensors] {path}: {message}")
