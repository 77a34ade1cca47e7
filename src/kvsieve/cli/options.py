"""Options that several commands share, in groups, named as in llama.cpp where it has them."""

from dataclasses import dataclass, field
from typing import Annotated

from kvsieve.cli.declare import at_least, integer, numbers, one_of, option, real, rows_format
from kvsieve.cli.model_source import PANEL, SourceOptions
from kvsieve.errors import ConfigError
from kvsieve.types import CACHE_TYPES, CacheType

__all__ = [
    "DrawingOptions",
    "ModelOptions",
    "SamplingOptions",
    "at_least",
    "integer",
    "numbers",
    "option",
    "real",
    "rows_format",
]

BACKENDS = ("native", "reference")

_MODEL = PANEL
_SAMPLING = "Sampling"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SourceOptions):
    """Which model runs, where, and how its cache is stored."""

    ctx_size: Annotated[
        int,
        integer(
            "-c",
            "--ctx-size",
            panel=_MODEL,
            help="Most tokens of prompt and reply together; 0 takes the model's own limit.",
        ),
    ] = 0
    threads: Annotated[
        int | None,
        integer(
            "-t",
            "--threads",
            panel=_MODEL,
            show_default="one per fast physical core",
            help="Threads that compute. Results do not depend on it.",
        ),
    ] = None
    cache_type_k: Annotated[
        str | None,
        option(
            "-ctk",
            "--cache-type-k",
            panel=_MODEL,
            metavar="TYPE",
            show_default="q8_0",
            help="How keys are stored: f32, f16, q8_0 or q4_0.",
        ),
    ] = None
    cache_type_v: Annotated[
        str | None,
        option(
            "-ctv",
            "--cache-type-v",
            panel=_MODEL,
            metavar="TYPE",
            show_default="q8_0",
            help="How values are stored: f32, f16, q8_0 or q4_0.",
        ),
    ] = None
    kv_q4: Annotated[
        bool, option("--kv-q4", panel=_MODEL, help="The same as -ctk q4_0 -ctv q4_0.")
    ] = False
    backend: Annotated[
        str,
        option(
            "--backend",
            panel=_MODEL,
            metavar="NAME",
            help="native (the C++ core) or reference (NumPy: slow, the specification).",
        ),
    ] = "native"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ctx_size < 0:
            raise ConfigError(f"-c/--ctx-size: expected 0 or more, got {self.ctx_size}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"-t/--threads: expected at least 1, got {self.threads}")
        for names, given in (
            ("-ctk/--cache-type-k", self.cache_type_k),
            ("-ctv/--cache-type-v", self.cache_type_v),
        ):
            if given is not None:
                one_of(names, given, CACHE_TYPES)
                if self.kv_q4 and given != "q4_0":
                    raise ConfigError(f"--kv-q4: expected no other {names} beside it, got {given}")
        one_of("--backend", self.backend, BACKENDS)

    @property
    def cache_types(self) -> tuple[CacheType, CacheType]:
        """Types of keys and values, defaults filled in."""
        default: CacheType = "q4_0" if self.kv_q4 else "q8_0"
        k_type, v_type = (self.cache_type_k or default), (self.cache_type_v or default)
        return k_type, v_type  # type: ignore[return-value]


Predict = Annotated[
    int,
    integer(
        "-n",
        "--predict",
        panel=_SAMPLING,
        help="Most tokens of a reply; -1: until the model ends or the context is full.",
    ),
]
Temperature = Annotated[
    float, real("--temp", panel=_SAMPLING, help="Temperature; 0 takes the best token.")
]


@dataclass(frozen=True, kw_only=True)
class DrawingOptions:
    """How the next token is chosen, and how many there may be, with llama.cpp's defaults."""

    predict: Predict = -1
    temp: Temperature = 0.8
    top_k: Annotated[
        int,
        integer("--top-k", panel=_SAMPLING, help="Draw from the N best; 0 is off."),
    ] = 40
    top_p: Annotated[
        float,
        real(
            "--top-p",
            panel=_SAMPLING,
            help="Draw from the fewest tokens that hold this probability; 1 is off.",
        ),
    ] = 0.95
    min_p: Annotated[
        float,
        real(
            "--min-p",
            panel=_SAMPLING,
            help="Leave out tokens less probable than this share of the best; 0 is off.",
        ),
    ] = 0.05
    seed: Annotated[
        int,
        integer("-s", "--seed", panel=_SAMPLING, help="-1 takes a random one."),
    ] = -1

    def __post_init__(self) -> None:
        if self.predict < -1:
            raise ConfigError(
                f"-n/--predict: expected a number of tokens, or -1 (until the context is full), "
                f"got {self.predict}"
            )
        if self.seed < -1:
            raise ConfigError(f"-s/--seed: expected -1 (random) or more, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(DrawingOptions):
    """The same for one reply, the best token each time unless told otherwise, and when to stop."""

    predict: Predict = 128
    temp: Temperature = 0.0
    stop: Annotated[
        list[str],
        option(
            "--stop",
            panel=_SAMPLING,
            metavar="TEXT",
            show_default=False,
            help="End before this text; may be given several times.",
        ),
    ] = field(default_factory=list)
    ignore_eos: Annotated[
        bool,
        option("--ignore-eos", panel=_SAMPLING, help="Go on when the model says it is done."),
    ] = False
