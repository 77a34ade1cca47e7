"""The options of sparse attention, and of comparing settings of it."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from kvsieve.attention.config import SparseAttention
from kvsieve.cli.options import integer, numbers, option, real
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import KEYS, Arm, parse_arms, read_layer_k

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
    "sparse_mass": "mass",
    "sparse_k_min": "k_min",
    "sparse_k_max": "k_max",
    "sparse_exact_layers": "exact_layers",
    "sparse_layer_k": "layer_k",
    "sparse_first_layer": "first_layer",
    "sparse_warn_mass": "warn_mass",
}
"""Option of the command line -> field of SparseAttention."""


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
            show_default="anchors",
            help="anchors (a block's most attended keys and the mean of the others), even (evenly "
            "spaced keys), minmax (bounds of the keys), mean, meanstd (their mean and spread), "
            "probe (the original rule: half of the budget goes to what the prompt attended to) or "
            "window (the first block and the last ones); to compare with: oracle (true attention, "
            "which reads all keys) and random.",
        ),
    ] = None
    sparse_share: Annotated[
        str | None,
        option(
            "--sparse-share",
            panel=_SPARSE,
            metavar="NAME",
            show_default="auto",
            help="While decoding, choose blocks per query head, or once per group of heads; auto: "
            "per group with --sparse-k 32 or more under anchors.",
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
            show_default="256",
            help="Last tokens of the prompt that are read exactly.",
        ),
    ] = None
    sparse_mass: Annotated[
        float | None,
        real(
            "--sparse-mass",
            panel=_SPARSE,
            show_default="off",
            help="Instead of always --sparse-k: as many blocks as hold this share of the attention "
            "by the estimate of selector anchors.",
        ),
    ] = None
    sparse_k_min: Annotated[
        int | None,
        integer(
            "--sparse-k-min",
            panel=_SPARSE,
            show_default="8",
            help="With --sparse-mass, blocks to read at least.",
        ),
    ] = None
    sparse_k_max: Annotated[
        int | None,
        integer(
            "--sparse-k-max",
            panel=_SPARSE,
            show_default="128",
            help="With --sparse-mass, blocks to read at most.",
        ),
    ] = None
    sparse_exact_layers: Annotated[
        str | None,
        option(
            "--sparse-exact-layers",
            panel=_SPARSE,
            metavar="N,N",
            show_default="none",
            help="Layers, counted from 0, that read everything.",
        ),
    ] = None
    sparse_layer_k: Annotated[
        str | None,
        option(
            "--sparse-layer-k",
            panel=_SPARSE,
            metavar="N:K,N:K",
            show_default="none",
            help="Layers, counted from 0, that may read K blocks instead of --sparse-k.",
        ),
    ] = None
    sparse_first_layer: Annotated[
        int | None,
        integer(
            "--sparse-first-layer",
            panel=_SPARSE,
            show_default="4",
            help="With anchors the first layer, whose attention is spread wide, reads so many "
            "times --sparse-k.",
        ),
    ] = None
    sparse_profile: Annotated[
        str | None,
        option(
            "--sparse-profile",
            panel=_SPARSE,
            metavar="FILE",
            show_default="beside the model, if it is there",
            help="What kvsieve calibrate found of the layers; none takes no profile.",
        ),
    ] = None
    sparse_warn_mass: Annotated[
        float | None,
        real(
            "--sparse-warn-mass",
            panel=_SPARSE,
            show_default="off",
            help="Say so when a reply kept less than this share of the attention, by the estimate "
            "of selector anchors.",
        ),
    ] = None

    def __post_init__(self) -> None:
        given = [*self._given(), *(["sparse_profile"] if self.sparse_profile else [])]
        if given and not self.sparse_attn:
            flag = "--" + given[0].replace("_", "-")
            raise ConfigError(f"{flag}: expected --sparse-attn beside it, without which it is idle")
        setting = SparseAttention(**self._fields())
        if setting.layers and self.sparse_profile not in (None, "none"):
            raise ConfigError(
                "--sparse-profile: expected no --sparse-exact-layers and no --sparse-layer-k "
                "beside it, which go before a profile, got both"
            )

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _SPARSE_FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def setting(self) -> SparseAttention | None:
        """The setting asked for; None is exact attention."""
        if not self.sparse_attn:
            return None
        return SparseAttention(**self._fields())

    def _fields(self) -> dict[str, Any]:
        fields = {_SPARSE_FIELDS[name]: value for name, value in self._given().items()}
        if self.sparse_exact_layers is not None:
            layers = numbers("--sparse-exact-layers", self.sparse_exact_layers, int)
            fields["exact_layers"] = tuple(layers)
        if self.sparse_layer_k is not None:
            fields["layer_k"] = _layer_budgets(self.sparse_layer_k)
        return fields


def _layer_budgets(text: str) -> tuple[tuple[int, int], ...]:
    try:
        return read_layer_k(text, separator=",")
    except ValueError:
        raise ConfigError(
            f"--sparse-layer-k: expected layers and blocks as in 3:64,7:64, got {text!r}"
        ) from None


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
            help=f"exact, or sparse[:key=value,...] with keys {', '.join(KEYS)}; may be given "
            "several times. No profile is taken for it.",
        ),
    ] = field(default_factory=list)

    def arms(self, sparse: SparseOptions) -> list[Arm]:
        """What to compare: every --attn, or exact beside what the --sparse options say."""
        if self.attn and sparse.sparse_attn:
            raise ConfigError("--attn: expected no --sparse-attn beside it, got both")
        if self.attn:
            return parse_arms(self.attn)
        return [Arm.of(None), Arm.of(sparse.setting or SparseAttention())]
