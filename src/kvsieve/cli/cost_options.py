"""Options of ``kvsieve cost``: a shape, a plan, times that somebody measured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args

from kvsieve.attention.config import SelectorName, SparseAttention
from kvsieve.cli.model_source import PANEL, ModelSource
from kvsieve.cli.options import at_least, integer, numbers, option, real
from kvsieve.errors import ConfigError

if TYPE_CHECKING:
    from kvsieve.lab.reading import Rule
    from kvsieve.lab.shape import ModelShape

_MODEL = PANEL
_PLAN = "Plan"
_TIMES = "Measured times"
_OUTPUT = "Output"

_SHAPE_FIELDS = {
    "head_dim": "--head-dim",
    "num_q_heads": "--num-q-heads",
    "num_kv_heads": "--num-kv-heads",
    "num_layers": "--layers",
}

_PART_FIELDS = {
    "select_ms": "--select-ms",
    "gather_ms": "--gather-ms",
    "sparse_ms": "--sparse-ms",
    "other_ms": "--other-ms",
}

DEFAULT_CONTEXT = "8192"
MEASURED_CONTEXTS = "2048,8192,32768"


@dataclass(frozen=True, kw_only=True)
class ShapeOptions(ModelSource):
    """Whose attention is counted: a model's, or the numbers given."""

    head_dim: Annotated[
        int | None,
        integer(
            "--head-dim",
            panel=_MODEL,
            show_default="the model's",
            help="Dimensions of a head; with this, the sizes here are counted, and no model.",
        ),
    ] = None
    num_q_heads: Annotated[
        int | None,
        integer("--num-q-heads", panel=_MODEL, show_default="1", help="Query heads."),
    ] = None
    num_kv_heads: Annotated[
        int | None,
        integer(
            "--num-kv-heads", panel=_MODEL, show_default="as many", help="Heads of keys and values."
        ),
    ] = None
    num_layers: Annotated[
        int | None, integer("--layers", panel=_MODEL, show_default="1", help="Layers.")
    ] = None
    cache_type: Annotated[
        str,
        option(
            "--cache-type",
            panel=_MODEL,
            metavar="TYPE",
            help="f32, f16, bf16, q8_0 or q4_0; K/V, as in q8_0/q4_0, where they differ.",
        ),
    ] = "q8_0"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [flag for name, flag in _SHAPE_FIELDS.items() if getattr(self, name) is not None]
        for flag, value in (("-m/--model", self.model), ("-hf/--hf-repo", self.hub)):
            if given and value is not None:
                raise ConfigError(f"{given[0]}: expected no {flag} beside it, got both")
        if given and self.head_dim is None:
            raise ConfigError(f"{given[0]}: expected --head-dim beside it, got none")

    def shape(self) -> "ModelShape":
        """From the numbers, or from what the model's files say: no weight is read."""
        from kvsieve.lab.shape import ModelShape

        k_type, _, v_type = self.cache_type.partition("/")
        types: dict[str, Any] = {"k_type": k_type, "v_type": v_type or k_type}
        if self.head_dim is not None:
            q_heads = self.num_q_heads or self.num_kv_heads or 1
            return ModelShape(
                head_dim=self.head_dim,
                num_q_heads=q_heads,
                num_kv_heads=q_heads if self.num_kv_heads is None else self.num_kv_heads,
                num_layers=1 if self.num_layers is None else self.num_layers,
                **types,
            )
        from kvsieve.engine.model_loader import resolve_model
        from kvsieve.models.model_file import open_model_file, read_config

        with open_model_file(resolve_model(self.source, offline=self.offline)) as file:
            return ModelShape.from_config(read_config(file), **types)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """At which contexts, and what is read instead of everything."""

    context: Annotated[
        str | None,
        option(
            "--context",
            panel=_PLAN,
            metavar="N,N,...",
            show_default=f"{DEFAULT_CONTEXT}; with --measure {MEASURED_CONTEXTS}",
            help="Tokens that a token sees, and of the prompt.",
        ),
    ] = None
    k: Annotated[
        int | None, integer("--k", panel=_PLAN, show_default="32", help="Blocks that may be read.")
    ] = None
    block_size: Annotated[
        int | None,
        integer(
            "--block-size",
            panel=_PLAN,
            show_default="32",
            help="Tokens per block: 32 or a multiple of it.",
        ),
    ] = None
    window: Annotated[
        int | None,
        integer(
            "--window",
            panel=_PLAN,
            help="Read the last N tokens: alone, or beside chosen blocks if those are asked for "
            "(counted as if they never overlapped).",
        ),
    ] = None
    selector: Annotated[
        str | None,
        option(
            "--selector",
            panel=_PLAN,
            metavar="NAME",
            show_default="anchors; none if there is only a --window",
            help=f"{', '.join(get_args(SelectorName))}; scan: a small index of every token is "
            "read; none.",
        ),
    ] = None
    share: Annotated[
        str | None,
        option(
            "--share",
            panel=_PLAN,
            metavar="NAME",
            show_default="auto",
            help="While decoding, choose per query head, or once per group of heads; "
            "auto: per group with --k 32 or more under anchors.",
        ),
    ] = None
    num_probes: Annotated[
        int | None,
        integer("--probe", panel=_PLAN, show_default="8", help="Keys looked at to score a block."),
    ] = None
    index_dims: Annotated[
        int | None,
        integer(
            "--index-dims",
            panel=_PLAN,
            show_default="16",
            help="Dimensions of the index that --selector scan reads.",
        ),
    ] = None
    dense_tail: Annotated[
        int | None,
        integer(
            "--dense-tail",
            panel=_PLAN,
            show_default="256",
            help="Last tokens of a prompt that are read exactly.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.index_dims is not None and self.selector != "scan":
            raise ConfigError("--index-dims: expected --selector scan beside it, got none")
        if self.selector == "none" and (self.window is None or self._choices()):
            raise ConfigError(
                "--selector: expected none only with a --window and nothing about blocks, "
                f"got {', '.join(self._choices()) or 'no window'}"
            )

    def _choices(self) -> dict[str, Any]:
        """What was said about the blocks."""
        names = ("k", "block_size", "share", "num_probes", "dense_tail")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def rule(self) -> "Rule":
        """What is read, as the ledger takes it."""
        from kvsieve.lab.reading import SELECTORS, Rule

        if self.selector is not None and self.selector not in SELECTORS:
            raise ConfigError(
                f"--selector: expected one of {', '.join(SELECTORS)}, got {self.selector!r}"
            )
        only_window = self.window is not None and not self._choices() and self.selector is None
        if only_window or self.selector == "none":
            return Rule(window_tokens=self.window)
        if self.selector == "scan":
            sparse = SparseAttention(selector="even", **self._choices())
            return Rule(sparse=sparse, scan_dims=self.index_dims or 16, window_tokens=self.window)
        named: dict[str, Any] = {} if self.selector is None else {"selector": self.selector}
        # All layers are counted alike; the first one's larger budget is its own.
        sparse = SparseAttention(first_layer=1, **named, **self._choices())
        return Rule(sparse=sparse, window_tokens=self.window)

    def contexts(self, default: str) -> list[int]:
        """The contexts to count or to measure."""
        contexts = numbers("--context", self.context or default, int)
        if min(contexts) < 1:
            raise ConfigError(f"--context: expected 1 token or more, got {self.context}")
        return list(dict.fromkeys(contexts))


@dataclass(frozen=True, kw_only=True)
class TimeOptions:
    """Times that somebody measured; with them nothing is counted, only compared."""

    attention_ms: Annotated[
        str | None,
        option(
            "--attention-ms",
            panel=_TIMES,
            metavar="X",
            help="Exact attention, per token; several, with commas, beside --total-ms.",
        ),
    ] = None
    select_ms: Annotated[
        float | None, real("--select-ms", panel=_TIMES, help="Choosing what to read.")
    ] = None
    gather_ms: Annotated[
        float | None,
        real("--gather-ms", panel=_TIMES, show_default="0", help="Copying it together."),
    ] = None
    sparse_ms: Annotated[
        float | None, real("--sparse-ms", panel=_TIMES, help="Attention over it.")
    ] = None
    other_ms: Annotated[
        float | None,
        real("--other-ms", panel=_TIMES, show_default="0", help="The rest of the token."),
    ] = None
    total_ms: Annotated[
        str | None,
        option(
            "--total-ms",
            panel=_TIMES,
            metavar="X,X,...",
            help="Whole tokens at several contexts: is what attention leaves a constant?",
        ),
    ] = None

    def __post_init__(self) -> None:
        parts = [flag for name, flag in _PART_FIELDS.items() if getattr(self, name) is not None]
        if self.total_ms is not None and parts:
            raise ConfigError(f"{parts[0]}: expected no --total-ms beside it, got both")
        if (parts or self.total_ms is not None) and self.attention_ms is None:
            flag = parts[0] if parts else "--total-ms"
            raise ConfigError(f"{flag}: expected --attention-ms beside it, got none")
        if self.attention_ms is not None and self.total_ms is None:
            for name in ("select_ms", "sparse_ms"):
                if getattr(self, name) is None:
                    raise ConfigError(f"{_PART_FIELDS[name]}: expected a time, got none")

    def lines(self) -> list[str] | None:
        """What the times say; None: none were given."""
        from kvsieve.lab.speedup import PartTimes, Rest
        from kvsieve.lab.statement import part_lines, rest_lines

        if self.attention_ms is None:
            return None
        attention = numbers("--attention-ms", self.attention_ms, float)
        if self.total_ms is not None:
            return rest_lines(Rest.of(numbers("--total-ms", self.total_ms, float), attention))
        if len(attention) != 1:
            raise ConfigError(f"--attention-ms: expected one time, got {self.attention_ms}")
        given = {name: getattr(self, name) or 0.0 for name in _PART_FIELDS}
        return part_lines(PartTimes(attention_ms=attention[0], **given))


@dataclass(frozen=True, kw_only=True)
class CostOutput:
    """What is shown, and whether the kernels run."""

    explain: Annotated[
        bool, option("--explain", panel=_OUTPUT, help="Show the formulas, with their numbers.")
    ] = False
    as_json: Annotated[
        bool, option("--json", panel=_OUTPUT, help="Print one JSON object per context.")
    ] = False
    measure: Annotated[
        bool,
        option(
            "--measure",
            panel=_OUTPUT,
            help="Run the kernels on caches of this shape: measured beside predicted.",
        ),
    ] = False
    rounds: Annotated[
        int | None,
        integer(
            "-r", "--repetitions", panel=_OUTPUT, show_default="100", help="Most rounds to measure."
        ),
    ] = None
    threads: Annotated[
        int | None,
        integer(
            "-t",
            "--threads",
            panel=_OUTPUT,
            show_default="one per fast physical core",
            help="Threads of --measure.",
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, flag in (("rounds", "-r/--repetitions"), ("threads", "-t/--threads")):
            value = getattr(self, name)
            if value is not None and not self.measure:
                raise ConfigError(f"{flag}: expected --measure beside it, without which it is idle")
            at_least(flag, value)
        if self.measure and (self.explain or self.as_json):
            raise ConfigError("--measure: expected no --explain or --json beside it, got both")
