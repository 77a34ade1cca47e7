"""Models from the Hugging Face Hub. The only module that imports `huggingface_hub`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvsieve.errors import ConfigError, ModelFileError

PREFIX = "hf:"
"""How the name of a model says that it is in the Hub."""

_FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""What a model folder needs, as patterns: other copies of its weights are not fetched."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """``user/repo[:file]``: a repository, and a GGUF file in it by its name or a part of that."""

    repo: str
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> "HubModel":
        """Read ``user/repo`` or ``user/repo:file``; ConfigError for anything else."""
        repo, _, file = text.partition(":")
        user, slash, name = repo.partition("/")
        if not (user and slash and name) or "/" in name or (":" in text and not file):
            raise ConfigError(
                f"[hub] model: expected user/repo or user/repo:file, got {text!r:.100}"
            )
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise ConfigError(f"[hub] file: expected a name within the repository, got {file!r}")
        return cls(repo=repo, file=file)


def download(model: HubModel, *, offline: bool = False) -> Path:
    """Path of a model file or folder in the local cache, fetched where it is missing.

    A download that was interrupted goes on where it ended. `offline` takes what the cache has and
    asks nobody.

    Raises
    ------
    ConfigError
        Several files would do, and none is named.
    ModelFileError
        There is no such repository or file, or it cannot be reached.
    """
    # Imported here: it takes a third of a second, and only models from the Hub need it.
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        names = _cached_files(model) if offline else _remote_files(model)
        gguf = _choose_gguf(model, names)
        if gguf is not None:
            return Path(hf_hub_download(model.repo, gguf, local_files_only=offline))
        return Path(
            snapshot_download(
                model.repo, allow_patterns=list(_FOLDER_FILES), local_files_only=offline
            )
        )
    except (OSError, HFValidationError) as failure:  # all errors of the library but that one
        reason = str(failure).strip().splitlines()
        raise ModelFileError(
            f"[hub] {model.repo}: expected a repository that can be "
            f"{'found in the local cache' if offline else 'reached'}, "
            f"got: {reason[0] if reason else type(failure).__name__}"
        ) from None


def _remote_files(model: HubModel) -> list[str]:
    from huggingface_hub import list_repo_files

    return list(list_repo_files(model.repo))


def _cached_files(model: HubModel) -> list[str]:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(model.repo, local_files_only=True))
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _choose_gguf(model: HubModel, names: Sequence[str]) -> str | None:
    """The GGUF file meant, or None: the repository is a model folder."""
    # A model's image tower is a file of its own, which is no model.
    ggufs = sorted(n for n in names if n.endswith(".gguf") and "mmproj" not in n.lower())
    if model.file:
        if model.file in names and model.file.endswith(".gguf"):
            return model.file
        found = [n for n in ggufs if model.file.lower() in n.lower()]
        if len(found) == 1:
            return found[0]
        expected = f"one file that {model.file!r} names"
    elif "config.json" in names and any(n.endswith(".safetensors") for n in names):
        return None
    elif len(ggufs) == 1:
        return ggufs[0]
    else:
        found, expected = ggufs, "a model folder, or :file behind the name to choose"
    got = ", ".join(found or ggufs) or "no GGUF file and no safetensors"
    raise ConfigError(f"[hub] {model.repo}: expected {expected}, got {got}")
