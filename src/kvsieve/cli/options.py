"""Options that several commands share, in groups, named as in llama.cpp where it has them."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from kvsieve.attention.config import SparseAttention
from kvsieve.cli.declare import integer, numbers, one_of, option, real
from kvsieve.cli.model_source import PANEL, SourceOptions
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import Arm, parse_arms
from kvsieve.types import CACHE_TYPES, CacheType

__all__ = [
    "ArmOptions",
    "ModelOptions",
    "SamplingOptions",
    "SparseOptions",
    "integer",
    "numbers",
    "option",
    "real",
]

BACKENDS = ("native", "reference")

_MODEL = PANEL
_SAMPLING = "Sampling"
_SPARSE = "Sparse attention"
_ARMS = "Comparison"

_SPARSE_FIELDS = {
    "sparse_k": "k",
    "sparse_block": "block_size",
    "sparse_probe": "num_probes",
    "sparse_selector": "selector",
    "sparse_share": "share",
    "sparse_phase": "phase",
    "sparse_dense_tail": "dense_tail",
}
"""Option of the command line -> field of SparseAttention."""


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


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen, and when to stop."""

    predict: Annotated[
        int,
        integer(
            "-n",
            "--predict",
            panel=_SAMPLING,
            help="Most tokens to generate; -1: until the model ends or the context is full.",
        ),
    ] = 128
    temp: Annotated[
        float,
        real("--temp", panel=_SAMPLING, help="Temperature; 0 takes the best token."),
    ] = 0.0
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

    def __post_init__(self) -> None:
        if self.predict < -1:
            raise ConfigError(
                f"-n/--predict: expected a number of tokens, or -1 (until the context is full), "
                f"got {self.predict}"
            )
        if self.seed < -1:
            raise ConfigError(f"-s/--seed: expected -1 (random) or more, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class SparseOptions:
    """The switches of sparse attention; the details need `--sparse-attn` beside them."""

    sparse_attn: Annotated[
        bool,
        option(
            "--sparse-attn",
            panel=_SPARSE,
            help="Read only the best blocks of the cache; without it attention is exact.",
        ),
    ] = False
    sparse_k: Annotated[
        int | None,
        integer(
            "--sparse-k",
            panel=_SPARSE,
            show_default="32",
            help="Blocks that a query may read.",
        ),
    ] = None
    sparse_block: Annotated[
        int | None,
        integer(
            "--sparse-block",
            panel=_SPARSE,
            show_default="32",
            help="Tokens per block: 32, or a multiple of it.",
        ),
    ] = None
    sparse_probe: Annotated[
        int | None,
        integer(
            "--sparse-probe",
            panel=_SPARSE,
            show_default="8",
            help="Keys looked at to score a block.",
        ),
    ] = None
    sparse_selector: Annotated[
        str | None,
        option(
            "--sparse-selector",
            panel=_SPARSE,
            metavar="NAME",
            show_default="probe",
            help="probe (half of the budget goes to what the prompt attended to) or even.",
        ),
    ] = None
    sparse_share: Annotated[
        str | None,
        option(
            "--sparse-share",
            panel=_SPARSE,
            metavar="NAME",
            show_default="head",
            help="While decoding, choose blocks per query head, or once per group of heads.",
        ),
    ] = None
    sparse_phase: Annotated[
        str | None,
        option(
            "--sparse-phase",
            panel=_SPARSE,
            metavar="NAME",
            show_default="both",
            help="Where it applies: both, prefill or decode.",
        ),
    ] = None
    sparse_dense_tail: Annotated[
        int | None,
        integer(
            "--sparse-dense-tail",
            panel=_SPARSE,
            show_default="128",
            help="Last tokens of the prompt that are read exactly.",
        ),
    ] = None

    def __post_init__(self) -> None:
        given = self._given()
        if given and not self.sparse_attn:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise ConfigError(f"{flag}: expected --sparse-attn beside it, without which it is idle")
        SparseAttention(**{_SPARSE_FIELDS[name]: value for name, value in given.items()})

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _SPARSE_FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def setting(self) -> SparseAttention | None:
        """The setting asked for; None is exact attention."""
        if not self.sparse_attn:
            return None
        return SparseAttention(**{_SPARSE_FIELDS[name]: v for name, v in self._given().items()})


@dataclass(frozen=True, kw_only=True)
class ArmOptions:
    """Attention settings to compare."""

    attn: Annotated[
        list[str],
        option(
            "--attn",
            panel=_ARMS,
            metavar="SETTING",
            show_default="exact, and sparse as the --sparse options say",
            help="exact, or sparse[:key=value,...] with keys k, block, probe, selector, share, "
            "phase, tail; may be given several times.",
        ),
    ] = field(default_factory=list)

    def arms(self, sparse: SparseOptions) -> list[Arm]:
        """What to compare: every --attn, or exact beside what the --sparse options say."""
        if self.attn and sparse.sparse_attn:
            raise ConfigError("--attn: expected no --sparse-attn beside it, got both")
        if self.attn:
            return parse_arms(self.attn)
        return [Arm.of(None), Arm.of(sparse.setting or SparseAttention())]
