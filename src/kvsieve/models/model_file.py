"""A model file of either kind, behind one interface."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kvsieve.models.checkpoint import Checkpoint
from kvsieve.models.checkpoint_config import checkpoint_config
from kvsieve.models.config import ModelConfig
from kvsieve.models.gguf import GgufFile
from kvsieve.models.gguf_header import TensorInfo
from kvsieve.types import U8


class TensorFile(Protocol):
    """What the decoder needs of a file: tensors by name, and their bytes, mapped."""

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def raw(self, name: str) -> U8: ...
    def forget_pages(self) -> None: ...
    def fingerprint(self) -> str: ...


ModelFile = GgufFile | Checkpoint


def open_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """Open a GGUF file, or a folder in Transformers' layout."""
    where = Path(path)
    return Checkpoint.open(where) if where.is_dir() else GgufFile.open(where)


def read_config(file: ModelFile) -> ModelConfig:
    """The configuration of a model file; `ModelFileError` names the first bad key."""
    if isinstance(file, GgufFile):
        return ModelConfig.from_gguf(file)
    name = file.path.resolve().name
    return checkpoint_config(file.config, tensors=file.tensors, name=name)


def notes(file: ModelFile) -> tuple[str, ...]:
    """What a user should know about a file that was opened: parts that are left out."""
    if isinstance(file, Checkpoint) and file.skipped_vision:
        return (f"text only: {file.skipped_vision} tensors of the image tower are left out",)
    return ()
