"""How sparse attention is asked for: one frozen value, checked when it is made."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from kvsieve.errors import ConfigError
from kvsieve.kernels.backend import BlockRule
from kvsieve.types import BLOCK_SIZE

SelectorName = Literal[
    "probe", "even", "anchors", "minmax", "mean", "meanstd", "window", "oracle", "random"
]
Share = Literal["head", "group"]
AskedShare = Literal["auto", "head", "group"]
Phase = Literal["both", "prefill", "decode"]

CONTROLS: tuple[SelectorName, ...] = ("oracle", "random")
"""Selectors for evaluation only: one reads everything to choose, the other looks at nothing."""

_BY_SHARES: tuple[SelectorName, ...] = ("anchors", "oracle")
"""Selectors whose scores are shares of the attention."""

ROOMY = 32
"""Blocks from which on a group's heads may as well choose together."""

LARGEST = 2**31 - 1
"""Of every number here: the kernels count in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """Read only the best `k` blocks of the cache for each query.

    k           budget in blocks, counting every block read (guards and diagonal included)
    block_size  tokens per selection block: 32, or a multiple (aligned cache blocks chosen together)
    num_probes  evenly spaced keys scored per block
    selector    ``anchors`` (a block's most attended keys and the mean of the others, as an
                estimate of its attention), ``even`` (evenly spaced keys), ``minmax`` (bounds of a
                block's keys), ``mean`` and ``meanstd`` (their mean; and how far they spread),
                ``probe`` (the original rule: half of the budget is reserved by prefill attention)
                or ``window`` (the first block and the last ones); for evaluation only ``oracle``
                (true attention, which reads all keys) and ``random``
    share       one selection per query ``head``, or one per ``group`` of heads that share a KV
                head (decode; prefill always shares by group); ``auto``: per group where `k` is 32
                or more under ``anchors``, else per head
    phase       where it applies: ``both``, ``prefill`` or ``decode``
    dense_tail  the last tokens of a prompt that are read exactly
    mass        ``anchors`` and ``oracle``: instead of always `k`, as many blocks as bring the
                share of the attention, by their estimate, to this; `k_min` to `k_max`
    exact_layers  layers (from 0) that read everything
    layer_k     budgets of single layers, as pairs (layer, k); the others have `k`. Not with `mass`
    first_layer   ``anchors`` with a fixed `k`: the first layer, whose attention is spread wide,
                reads so many times `k`, unless `layer_k` or `exact_layers` names it
    profile     file of `kvsieve calibrate` that `exact_layers` and `layer_k` came from
    warn_mass   a reply whose estimated kept mass is under this says so; 0: never
    seed        of ``random``
    rule        a selector written in Python (`attention.selectors.base.Selector`) in the place of
                `selector`, under this budget; slower, and for `LLM` alone
    """

    k: int = 32
    block_size: int = 32
    num_probes: int = 8
    selector: SelectorName = "anchors"
    share: AskedShare = "auto"
    phase: Phase = "both"
    dense_tail: int = 256
    mass: float | None = None
    k_min: int = 8
    k_max: int = 128
    exact_layers: tuple[int, ...] = ()
    layer_k: tuple[tuple[int, int], ...] = ()
    first_layer: int = 4
    profile: str = ""
    warn_mass: float = 0.0
    seed: int = 0
    rule: BlockRule | None = None

    def __post_init__(self) -> None:
        _check_int("k", self.k, minimum=1)
        _check_int("num_probes", self.num_probes, minimum=1)
        _check_int("dense_tail", self.dense_tail, minimum=0)
        _check_int("first_layer", self.first_layer, minimum=1)
        _check_int("block_size", self.block_size, minimum=BLOCK_SIZE)
        if self.block_size % BLOCK_SIZE:
            raise ConfigError(
                f"[SparseAttention] block_size: expected {BLOCK_SIZE} or a multiple of it, "
                f"got {self.block_size}"
            )
        if self.num_probes > self.block_size:
            raise ConfigError(
                f"[SparseAttention] num_probes: expected at most block_size={self.block_size}, "
                f"got {self.num_probes}"
            )
        _check_choice("selector", self.selector, get_args(SelectorName))
        _check_choice("share", self.share, get_args(AskedShare))
        _check_choice("phase", self.phase, get_args(Phase))
        self._check_budget()
        self._check_rule()
        _check_int("seed", self.seed, minimum=0)
        if self.seed and self.selector != "random":
            raise ConfigError(
                f"[SparseAttention] seed: expected selector random, got {self.selector}"
            )

    def _check_rule(self) -> None:
        if self.rule is None:
            return
        if not callable(getattr(self.rule, "block_lists", None)):
            raise ConfigError(f"[SparseAttention] rule: expected a Selector, got {self.rule!r}")
        if self.selector != SparseAttention.selector or self.mass is not None:
            raise ConfigError(
                "[SparseAttention] rule: expected neither selector nor mass beside it, got "
                f"{self.selector} and {self.mass}"
            )

    @property
    def selector_name(self) -> str:
        """The selector's, or the class of the rule in its place."""
        return self.selector if self.rule is None else type(self.rule).__name__

    def _check_budget(self) -> None:
        _check_int("k_min", self.k_min, minimum=1)
        _check_int("k_max", self.k_max, minimum=1)
        if self.k_min > self.k_max:
            raise ConfigError(
                f"[SparseAttention] k_min: expected at most k_max={self.k_max}, got {self.k_min}"
            )
        if self.mass is not None:
            _check_share("mass", self.mass)
            if not self.mass > 0:
                raise ConfigError(
                    f"[SparseAttention] mass: expected a share above 0, got {self.mass}"
                )
            if self.selector not in _BY_SHARES:
                raise ConfigError(
                    "[SparseAttention] mass: expected selector anchors, whose scores are shares of "
                    f"the attention, got {self.selector}"
                )
        _check_share("warn_mass", self.warn_mass)
        if self.warn_mass and self.selector not in _BY_SHARES:
            raise ConfigError(
                "[SparseAttention] warn_mass: expected selector anchors, which estimates it, got "
                f"{self.selector}"
            )
        self._check_layers()

    def _check_layers(self) -> None:
        if not isinstance(self.exact_layers, tuple):
            raise ConfigError(
                f"[SparseAttention] exact_layers: expected a tuple, got {self.exact_layers!r}"
            )
        for layer in self.exact_layers:
            _check_int("exact_layers", layer, minimum=0)
        if not isinstance(self.layer_k, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 for pair in self.layer_k
        ):
            raise ConfigError(
                f"[SparseAttention] layer_k: expected a tuple of pairs (layer, k), "
                f"got {self.layer_k!r}"
            )
        layers = [layer for layer, _ in self.layer_k]
        for layer, k in self.layer_k:
            _check_int("layer_k", layer, minimum=0)
            _check_int("layer_k", k, minimum=1)
        if len(set(layers) | set(self.exact_layers)) < len(layers) + len(set(self.exact_layers)):
            raise ConfigError(
                f"[SparseAttention] layer_k: expected each layer once, and none of exact_layers="
                f"{self.exact_layers}, got {self.layer_k}"
            )
        if self.layer_k and self.mass is not None:
            raise ConfigError(
                "[SparseAttention] layer_k: expected no mass beside it, which gives each layer "
                f"what it needs, got mass={self.mass}"
            )

    @property
    def sharing(self) -> Share:
        """What `share` comes to.

        A group's heads read the same blocks, once, but choose a little worse for each: with few
        blocks that shows (docs/selectors.md).
        """
        if self.share != "auto":
            return self.share
        has_room = self.selector_name == "anchors" and self.mass is None and self.k >= ROOMY
        return "group" if has_room else "head"

    @property
    def largest_budget(self) -> int:
        """Blocks that a query reads at most, in layers without a budget of their own."""
        return self.k if self.mass is None else self.k_max

    @property
    def smallest_budget(self) -> int:
        """Up to so many blocks a context is read whole."""
        if self.mass is not None:
            return self.k_min
        return min([self.k, *(k for _, k in self.layer_k)])

    @property
    def layer_budgets(self) -> tuple[tuple[int, int], ...]:
        """Budgets of single layers, as pairs (layer, k): `layer_k`, and the first layer's."""
        is_raised = self.selector_name == "anchors" and self.mass is None and self.first_layer > 1
        if not is_raised or 0 in self.layers:
            return self.layer_k
        return ((0, min(LARGEST, self.k * self.first_layer)), *self.layer_k)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that were asked to be treated apart."""
        return (*self.exact_layers, *(layer for layer, _ in self.layer_k))

    def of_layer(self, layer: int) -> "SparseAttention | None":
        """The setting as one layer follows it, whatever its number there; None: exactly."""
        if layer in self.exact_layers:
            return None
        k = dict(self.layer_budgets).get(layer, self.k)
        return replace(self, k=k, exact_layers=(), layer_k=(), first_layer=1, share=self.sharing)

    @property
    def uses_importance(self) -> bool:
        """Whether prefill has to record how much attention each token received."""
        return self.selector == "probe" and self.phase != "prefill" and self.rule is None


def _check_int(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST:
        too_large = isinstance(value, int) and value > LARGEST
        limit = f"at most {LARGEST}" if too_large else f"at least {minimum}"
        raise ConfigError(
            f"[SparseAttention] {name}: expected an integer of {limit}, got {value!r}"
        )


def _check_share(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"[SparseAttention] {name}: expected a share, 0 to 1, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"[SparseAttention] {name}: expected one of {', '.join(choices)}, got {value!r}"
        )
