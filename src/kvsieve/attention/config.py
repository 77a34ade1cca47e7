"""How sparse attention is asked for: one frozen value, checked when it is made."""

from dataclasses import dataclass
from typing import Literal, get_args

from kvsieve.errors import ConfigError
from kvsieve.types import BLOCK_SIZE

SelectorName = Literal["probe", "even"]
Share = Literal["head", "group"]
Phase = Literal["both", "prefill", "decode"]

LARGEST = 2**31 - 1
"""Of every number here: the kernels count in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """Read only the best `k` blocks of the cache for each query.

    k           budget in blocks, counting every block read (guards and diagonal included)
    block_size  tokens per selection block: 32, or a multiple (aligned cache blocks chosen together)
    num_probes  evenly spaced keys scored per block
    selector    ``probe`` (the original rule, with half of the budget reserved by prefill
                attention) or ``even``
    share       one selection per query ``head``, or one per ``group`` of heads that share a KV
                head (decode; prefill always shares by group)
    phase       where it applies: ``both``, ``prefill`` or ``decode``
    dense_tail  the last tokens of a prompt that are read exactly
    """

    k: int = 32
    block_size: int = 32
    num_probes: int = 8
    selector: SelectorName = "probe"
    share: Share = "head"
    phase: Phase = "both"
    dense_tail: int = 128

    def __post_init__(self) -> None:
        _check_int("k", self.k, minimum=1)
        _check_int("num_probes", self.num_probes, minimum=1)
        _check_int("dense_tail", self.dense_tail, minimum=0)
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
        _check_choice("share", self.share, get_args(Share))
        _check_choice("phase", self.phase, get_args(Phase))

    @property
    def uses_importance(self) -> bool:
        """Whether prefill has to record how much attention each token received."""
        return self.selector == "probe" and self.phase != "prefill"


def _check_int(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST:
        too_large = isinstance(value, int) and value > LARGEST
        limit = f"at most {LARGEST}" if too_large else f"at least {minimum}"
        raise ConfigError(
            f"[SparseAttention] {name}: expected an integer of {limit}, got {value!r}"
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"[SparseAttention] {name}: expected one of {', '.join(choices)}, got {value!r}"
        )
