"""From measured parts of a token's time to what sparse attention gained, and what to do next."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.errors import ConfigError
from kvsieve.lab.arithmetic import attention_speedup_ratio, other_ms, whole_speedup_ratio


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Milliseconds of a token: exact attention, the three parts of its replacement, the rest."""

    attention_ms: float
    select_ms: float
    sparse_ms: float
    gather_ms: float = 0.0
    other_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("attention_ms", "select_ms", "gather_ms", "sparse_ms", "other_ms"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"[PartTimes] {name}: expected 0 ms or more, got {value}")
        if self.attention_ms == 0 or self.replacement_ms == 0:
            raise ConfigError(
                "[PartTimes] attention_ms: expected exact and sparse attention above 0 ms, got "
                f"{self.attention_ms} and {self.replacement_ms}"
            )

    @property
    def parts_ms(self) -> dict[str, float]:
        """What replaces exact attention."""
        return {
            "selection": self.select_ms,
            "gathering": self.gather_ms,
            "sparse attention": self.sparse_ms,
        }

    @property
    def replacement_ms(self) -> float:
        """``select + gather + sparse``."""
        return self.select_ms + self.gather_ms + self.sparse_ms

    @property
    def attention_speedup_ratio(self) -> float:
        """See `arithmetic.attention_speedup_ratio`."""
        return attention_speedup_ratio(
            attention_ms=self.attention_ms,
            select_ms=self.select_ms,
            gather_ms=self.gather_ms,
            sparse_ms=self.sparse_ms,
        )

    @property
    def whole_speedup_ratio(self) -> float:
        """See `arithmetic.whole_speedup_ratio`."""
        return whole_speedup_ratio(
            attention_ms=self.attention_ms,
            select_ms=self.select_ms,
            gather_ms=self.gather_ms,
            sparse_ms=self.sparse_ms,
            other_ms=self.other_ms,
        )

    @property
    def best_whole_ratio(self) -> float | None:
        """What no sparse attention can exceed: ``(full + other) / other``; None: no limit known."""
        return (self.attention_ms + self.other_ms) / self.other_ms if self.other_ms else None

    @property
    def attack_first(self) -> str:
        """The largest part; the first named among equals."""
        return max(self.parts_ms, key=lambda name: self.parts_ms[name])


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What tokens cost beside attention, one number for each context measured."""

    other_ms: tuple[float, ...]

    @classmethod
    def of(cls, totals_ms: Sequence[float], attention_ms: Sequence[float]) -> "Rest":
        """``total - attention`` of each pair."""
        if not totals_ms or len(totals_ms) != len(attention_ms):
            raise ConfigError(
                f"[Rest] totals_ms: expected as many as attention times, at least one, got "
                f"{len(totals_ms)} and {len(attention_ms)}"
            )
        pairs = zip(totals_ms, attention_ms, strict=True)
        return cls(other_ms=tuple(other_ms(total, attention_ms=part) for total, part in pairs))

    @property
    def mean_ms(self) -> float:
        """The constant, if it is one."""
        return sum(self.other_ms) / len(self.other_ms)

    @property
    def spread(self) -> float:
        """Largest distance from the mean, as a share of it."""
        return max(abs(value - self.mean_ms) for value in self.other_ms) / self.mean_ms
