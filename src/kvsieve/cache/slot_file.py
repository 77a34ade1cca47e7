"""Blocks of one sequence in a file: all of it or nothing, and nothing that isn't what was written.

Layout: ``KVSIEVE-SLOT``, u32 version, u64 length of the header; the header (JSON); token ids
i32; the pages, block by block, each ``u8 [L, Hkv, page_bytes]``; selector snapshots; SHA-256 of
everything before it. Integers are little-endian.
"""

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import blocks_for
from kvsieve.cache.snapshot import SelectorSnapshot
from kvsieve.errors import CapacityError, SlotFileError
from kvsieve.types import BLOCK_SIZE, I32, U8

_MAGIC = b"KVSIEVE-SLOT"
_VERSION = 1
_FIXED = struct.Struct("<12sIQ")
_DIGEST_BYTES = 32
_MAX_HEADER = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class SavedBlocks:
    """What a file holds.

    ids        i32 ``[T]``
    origins    of each block (`PrefixCache`)
    pages      ``u8 [blocks, L, Hkv, page_bytes]``, the last one perhaps in part
    snapshots  by (number of the block they end with, kind)
    """

    ids: I32
    origins: list[bytes]
    pages: U8
    snapshots: Mapping[tuple[int, str], SelectorSnapshot] = field(default_factory=dict)


def write_slot(
    path: str | PathLike[str], saved: SavedBlocks, *, pool: BlockPool, fingerprint: str
) -> int:
    """Write `saved` and give the number of bytes; `path` has its old content until all is there.

    SlotFileError if the file cannot be written.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                num_bytes = _write(file, saved, _identity(pool, fingerprint))
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise SlotFileError(f"[save_slot] {target}: expected to write it, got {error}") from error
    return num_bytes


def read_slot(
    path: str | PathLike[str], *, pool: BlockPool, fingerprint: str, max_bytes: int
) -> tuple[SavedBlocks, int]:
    """Read and check a file; returns what it holds and its size.

    SlotFileError: missing, damaged, or of another model or cache. CapacityError: its pages and
    snapshots take more than `max_bytes`. Nothing large is read before both are known.
    """
    target = Path(path)
    try:
        with target.open("rb") as file:
            return _read(file, str(target), _identity(pool, fingerprint), max_bytes)
    except OSError as error:
        raise SlotFileError(f"[restore_slot] {target}: expected a file, got {error}") from error


def _identity(pool: BlockPool, fingerprint: str) -> dict[str, Any]:
    """What has to be the same for a page to mean the same."""
    layout = pool.layout
    return {
        "fingerprint": fingerprint,
        "k_type": layout.k_type,
        "v_type": layout.v_type,
        "head_dim": layout.head_dim,
        "num_layers": pool.num_layers,
        "num_kv_heads": pool.num_kv_heads,
        "page_bytes": layout.page_bytes,
    }


# -- writing -------------------------------------------------------------------------------------
def _write(file: BinaryIO, saved: SavedBlocks, identity: dict[str, Any]) -> int:
    header = {
        "model": identity,
        "num_tokens": len(saved.ids),
        "origins": [origin.hex() for origin in saved.origins],
        "snapshots": [
            {
                "block": block,
                "kind": kind,
                "since": one.since,
                "num_tokens": one.num_tokens,
                "first_group": one.first_group,
                "index": None if one.index is None else list(one.index.shape),
                "importance": None if one.importance is None else list(one.importance.shape),
            }
            for (block, kind), one in saved.snapshots.items()
        ],
    }
    text = json.dumps(header).encode()
    digest, num_bytes = hashlib.sha256(), 0
    for part in _parts(text, saved):
        file.write(part)
        digest.update(part)
        num_bytes += len(part)
    file.write(digest.digest())
    return num_bytes + _DIGEST_BYTES


def _parts(header: bytes, saved: SavedBlocks) -> Iterator[bytes]:
    yield _FIXED.pack(_MAGIC, _VERSION, len(header)) + header
    yield saved.ids.astype("<i4").tobytes()
    for page in saved.pages:
        yield page.tobytes()
    for snapshot in saved.snapshots.values():
        if snapshot.index is not None:
            yield snapshot.index.tobytes()
        if snapshot.importance is not None:
            yield snapshot.importance.astype("<i8").tobytes()


def _sync_folder(folder: Path) -> None:
    """Make the new name last, where folders can be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- reading -------------------------------------------------------------------------------------
def _read(
    file: BinaryIO, name: str, identity: dict[str, Any], max_bytes: int
) -> tuple[SavedBlocks, int]:
    size = os.fstat(file.fileno()).st_size
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size or not fixed.startswith(_MAGIC):
        raise _damaged(name, f"a saved slot (it begins with {_MAGIC.decode()})", "another file")
    _, version, header_bytes = _FIXED.unpack(fixed)
    if version != _VERSION:
        raise _damaged(name, f"version {_VERSION}", f"version {version}")
    if header_bytes > min(_MAX_HEADER, size - _FIXED.size):
        raise _damaged(name, "a header within the file", f"one of {header_bytes} bytes")
    text = file.read(header_bytes)
    header = _Header(text, name, identity)
    expected = _FIXED.size + header_bytes + header.num_bytes + _DIGEST_BYTES
    if expected != size:
        raise _damaged(name, f"{expected} bytes", f"{size}")
    if header.num_bytes > max_bytes:
        raise CapacityError(
            f"[restore_slot] {name}: expected at most the {max_bytes >> 20} MiB that the prefix "
            f"cache may have, got {header.num_bytes >> 20} MiB"
        )
    body = file.read(header.num_bytes)
    digest = hashlib.sha256(fixed + text)
    digest.update(body)
    if len(body) != header.num_bytes or digest.digest() != file.read(_DIGEST_BYTES):
        raise _damaged(name, "the checksum that was written", "another one: the file is damaged")
    return header.saved(body), size


def _damaged(name: str, expected: str, got: str) -> SlotFileError:
    return SlotFileError(f"[restore_slot] {name}: expected {expected}, got {got}")


class _Header:
    """The header's values, each checked for type and size before it is used."""

    def __init__(self, text: bytes, name: str, identity: dict[str, Any]) -> None:
        try:
            values = json.loads(text)
            _check_identity(values["model"], name, identity)
            self.num_tokens = _count(values["num_tokens"])
            self.origins = [bytes.fromhex(origin) for origin in values["origins"]]
            self.snapshots = [
                _snapshot_fields(one, self.num_tokens, identity) for one in values["snapshots"]
            ]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(name, "a sound header", f"{type(error).__name__}: {error}") from None
        self.num_blocks = blocks_for(self.num_tokens)
        if not self.num_tokens or len(self.origins) != self.num_blocks:
            raise _damaged(name, f"{self.num_blocks} origins", f"{len(self.origins)}")
        heads, layers = identity["num_kv_heads"], identity["num_layers"]
        self._page_shape = (layers, heads, identity["page_bytes"])

    @property
    def num_bytes(self) -> int:
        """Bytes between the header and the checksum."""
        pages = self.num_blocks * int(np.prod(self._page_shape, dtype=object))
        return 4 * self.num_tokens + pages + sum(_snapshot_bytes(one) for one in self.snapshots)

    def saved(self, body: bytes) -> SavedBlocks:
        """Cut the bytes into arrays."""
        take = _Taker(body)
        ids = take.array("<i4", (self.num_tokens,)).astype(np.int32)
        pages = take.array("u1", (self.num_blocks, *self._page_shape))
        snapshots: dict[tuple[int, str], SelectorSnapshot] = {}
        for one in self.snapshots:
            index, importance = one["index"], one["importance"]
            snapshots[one["block"], one["kind"]] = SelectorSnapshot(
                since=one["since"],
                num_tokens=one["num_tokens"],
                first_group=one["first_group"],
                index=None if index is None else take.array("u1", index),
                importance=None if importance is None else take.array("<i8", importance),
            )
        return SavedBlocks(ids=ids, origins=self.origins, pages=pages, snapshots=snapshots)


def _check_identity(model: Mapping[str, Any], name: str, identity: dict[str, Any]) -> None:
    for key, wanted in identity.items():
        if model[key] != wanted:
            raise _damaged(name, f"{key} {wanted}, as the running model has it", f"{model[key]!r}")


class _Taker:
    """Gives out the bytes of a body, array after array."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def array(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """The next array of this shape."""
        count = int(np.prod(shape, dtype=object))
        array = np.frombuffer(self._body, dtype, count, offset=self._at)
        self._at += array.nbytes
        return array.reshape(shape)


def _snapshot_fields(
    one: Mapping[str, Any], num_tokens: int, identity: dict[str, Any]
) -> dict[str, Any]:
    """Raises ValueError, KeyError or TypeError where something does not fit."""
    fields: dict[str, Any] = {"kind": str(one["kind"]), "index": None, "importance": None}
    fields |= {key: _count(one[key]) for key in ("block", "since", "num_tokens", "first_group")}
    at = fields["num_tokens"]
    if not fields["since"] < at <= num_tokens or at != (fields["block"] + 1) * BLOCK_SIZE:
        raise ValueError(f"a snapshot at {at} tokens after block {fields['block']}")
    layers, heads = identity["num_layers"], identity["num_kv_heads"]
    if one["index"] is not None:
        shape = tuple(_count(n) for n in one["index"])
        if len(shape) != 4 or (shape[0], shape[2]) != (layers, heads):
            raise ValueError(f"a selector index of shape {shape}")
        fields["index"] = shape
    if one["importance"] is not None:
        if tuple(one["importance"]) != (layers, at):
            raise ValueError(f"importance of shape {one['importance']}")
        fields["importance"] = (layers, at)
    return fields


def _snapshot_bytes(fields: Mapping[str, Any]) -> int:
    sizes = ((fields["index"], 1), (fields["importance"], 8))
    return sum(
        size * int(np.prod(shape, dtype=object)) for shape, size in sizes if shape is not None
    )


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
        raise ValueError(f"{value!r} where a count belongs")
    return value
