"""A model folder in the layout of the Transformers library: ``config.json`` and safetensors."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsieve.errors import ModelFileError
from kvsieve.models.gguf_header import TensorInfo
from kvsieve.models.safetensors import SafetensorsFile, read_json
from kvsieve.types import U8

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_JSON_BYTES = 1 << 26

# Where the language model of a larger one begins, and what its tensors are called here.
_RENAMED = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_VISION = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.")
)
# Tables that old checkpoints carry though they follow from the configuration.
_DERIVED = (".rotary_emb.inv_freq",)


class Checkpoint:
    """A folder with a model, its shards mapped read-only.

    `tensors` has the language model's, named as in a checkpoint of that model alone;
    `skipped_vision` counts those of an image tower. With an index, it decides which shard a
    tensor comes from, and files that it does not name are not looked at.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], shards: Sequence[SafetensorsFile],
        placed: Sequence[tuple[str, SafetensorsFile]],
    ) -> None:  # fmt: skip
        self.path = path
        self.config = config
        self._shards = shards
        self._places: dict[str, tuple[SafetensorsFile, str]] = {}
        tensors: dict[str, TensorInfo] = {}
        self.skipped_vision = 0
        for stored, shard in placed:
            if stored.startswith(_VISION):
                self.skipped_vision += 1
                continue
            name = _language_name(stored)
            if name.endswith(_DERIVED):
                continue
            if name in tensors:
                raise ModelFileError(
                    f"[Checkpoint] {path}: expected one tensor {name!r}, got another: {stored!r}"
                )
            tensors[name] = replace(shard.tensors[stored], name=name)
            self._places[name] = (shard, stored)
        self.tensors: Mapping[str, TensorInfo] = tensors

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """Map the shards of a folder and check every header, before any weight is read."""
        folder = Path(path)
        config = read_json(folder / CONFIG, max_bytes=_MAX_JSON_BYTES)
        index = folder / INDEX
        weight_map = _weight_map(index) if index.exists() else None
        names = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelFileError(
                f"[Checkpoint] {folder}: expected the files {', '.join(names)}, "
                f"got none called {', '.join(missing)}"
            )
        shards: dict[str, SafetensorsFile] = {}
        try:
            for name in names:
                shards[name] = SafetensorsFile.open(folder / name)
            if weight_map is None:
                placed = [(name, shard) for shard in shards.values() for name in shard.tensors]
            else:
                placed = [(name, shards[file]) for name, file in weight_map.items()]
                _check_placed(folder, placed)
            return cls(folder, config, list(shards.values()), placed)
        except BaseException:
            for shard in shards.values():
                shard.close()
            raise

    @property
    def file_bytes(self) -> int:
        """Size of all shards."""
        return sum(shard.file_bytes for shard in self._shards)

    def raw(self, name: str) -> U8:
        """Bytes of a tensor: a read-only view ``u8 [nbytes]`` of a mapping."""
        if name not in self._places:
            raise ModelFileError(f"[Checkpoint] {self.path}: expected a tensor {name!r}, got none")
        shard, stored = self._places[name]
        return shard.raw(stored)

    def forget_pages(self) -> None:
        """Take what was read of the mappings out of this process's memory."""
        for shard in self._shards:
            shard.forget_pages()

    def fingerprint(self) -> str:
        """16 hex digits that tell this model from others without reading all of it.

        As `GgufFile.fingerprint`: sizes, headers, ``config.json``, and the 64 bytes in the middle
        of every tensor.
        """
        digest = hashlib.sha256((self.path / CONFIG).read_bytes())
        for shard in self._shards:
            digest.update(shard.file_bytes.to_bytes(8, "little"))
            digest.update(shard.header)
            for name, info in shard.tensors.items():
                middle = info.nbytes // 2
                digest.update(shard.raw(name)[max(0, middle - 32) : middle + 32].tobytes())
        return digest.hexdigest()[:16]

    def close(self) -> None:
        """Drop the mappings."""
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _language_name(stored: str) -> str:
    for prefix, plain in _RENAMED:
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index, max_bytes=_MAX_JSON_BYTES).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelFileError(
            f"[Checkpoint] {index}: weight_map: expected an object, got {found!r:.60}"
        )
    for name, file in found.items():
        # A shard is a file beside the index, and nothing else.
        is_name = isinstance(file, str) and Path(file).name == file and "\\" not in file
        if not is_name or not file.endswith(".safetensors"):
            raise ModelFileError(
                f"[Checkpoint] {index}: tensor {name!r}: expected the name of a safetensors file "
                f"in the same folder, got {file!r:.80}"
            )
    return found


def _check_placed(folder: Path, placed: Sequence[tuple[str, SafetensorsFile]]) -> None:
    lacking = [(name, shard) for name, shard in placed if name not in shard.tensors]
    if lacking:
        name, shard = lacking[0]
        raise ModelFileError(
            f"[Checkpoint] {folder}: expected {name!r} in {shard.path.name}, as {INDEX} says, "
            f"got no such tensor there ({len(lacking)} such)"
        )
