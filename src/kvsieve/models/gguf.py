"""GGUF model files: the checked header, and the bytes of each tensor through a memory map."""

import hashlib
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvsieve.errors import ModelFileError
from kvsieve.models.gguf_header import Header, TensorInfo, read_header
from kvsieve.types import U8

__all__ = ["GgufFile", "TensorInfo"]


class GgufFile:
    """A GGUF file, mapped read-only: `metadata`, `tensors`, and the bytes of each tensor.

    Sizes are checked against the file as it is when opened; a file that another program shortens
    later is beyond our reach. Arrays that `raw` gave out keep the mapping alive after `close`.
    """

    def __init__(self, path: Path, header: Header, mapping: mmap.mmap) -> None:
        self.path = path
        self.header = header
        self._mapping = mapping
        self._bytes: U8 | None = np.frombuffer(mapping, np.uint8)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GgufFile":
        """Map the file and check its whole header; `ModelFileError` if anything is wrong."""
        where = Path(path)
        try:
            # Looked at before it is opened: opening a pipe would wait for a writer.
            if not stat.S_ISREG(where.stat().st_mode):
                raise ModelFileError(
                    f"[GgufFile] {where}: expected a regular file, got another kind"
                )
            with where.open("rb") as stream:
                if os.fstat(stream.fileno()).st_size == 0:
                    raise ModelFileError(f"[GgufFile] {where}: expected a GGUF file, got 0 bytes")
                mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as failure:
            reason = getattr(failure, "strerror", None) or failure
            raise ModelFileError(
                f"[GgufFile] {where}: expected a readable file, got: {reason}"
            ) from None
        try:
            header = read_header(mapping, source=str(where))
        except BaseException:
            mapping.close()
            raise
        return cls(where, header, mapping)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Values by key; see `read_header` for their types."""
        return self.header.metadata

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Where each tensor lies, by name, in the order of the file."""
        return self.header.tensors

    @property
    def file_bytes(self) -> int:
        """Size of the file when it was opened."""
        return len(self._view())

    def raw(self, name: str) -> U8:
        """Bytes of a tensor: a read-only view ``u8 [nbytes]`` of the mapping."""
        if name not in self.tensors:
            raise ModelFileError(
                f"[GgufFile.raw] {self.path}: expected a tensor {name!r}, got none"
            )
        info = self.tensors[name]
        return self._view()[info.offset : info.offset + info.nbytes]

    def forget_pages(self) -> None:
        """Take what was read of the mapping out of this process's memory; reading brings it back.

        Pages of a file that was read once, to be packed, would else count as resident for good.
        """
        if hasattr(self._mapping, "madvise"):  # not on Windows
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def fingerprint(self) -> str:
        """16 hex digits that tell this model from others without reading all of it.

        The start of a SHA-256 over the file's size, its header (metadata and tensor table) and
        the 64 bytes in the middle of every tensor. Two files that differ only elsewhere would
        look the same: enough to name a result's model, not to prove that a file is unharmed.
        """
        data = self._view()
        digest = hashlib.sha256(len(data).to_bytes(8, "little"))
        digest.update(data[: self.header.header_bytes].data)
        for info in self.tensors.values():
            middle = info.offset + info.nbytes // 2
            digest.update(data[max(info.offset, middle - 32) : middle + 32].data)
        return digest.hexdigest()[:16]

    def close(self) -> None:
        """Drop the mapping (now, or when the last array given out is gone)."""
        self._bytes = None
        try:
            self._mapping.close()
        except BufferError:
            return

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _view(self) -> U8:
        if self._bytes is None:
            raise ModelFileError(f"[GgufFile] {self.path}: expected an open file, got a closed one")
        return self._bytes
