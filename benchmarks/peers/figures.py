"""Medians over rounds, ratios within rounds, and who is the best peer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from peers.arms import Speed

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median with the lowest and highest value that it stands for."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median=median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Who took part."""

    name: str
    version: str
    is_peer: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an engine made of one pass key."""

    engine: str
    prompt_tokens: int
    depth: float
    key: str
    reply: str
    hit: bool


@dataclass(kw_only=True)
class Comparison:
    """Everything that was measured: ``speeds[depth][engine]`` has one entry per round."""

    machine: dict[str, str]
    settings: dict[str, str]
    engines: list[Engine]
    speeds: dict[int, dict[str, list[Speed]]]
    answers: list[Answer] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def found(self, engine: str) -> tuple[int, int]:
        """Pass keys found, and asked for."""
        hits = [answer.hit for answer in self.answers if answer.engine == engine]
        return sum(hits), len(hits)

    def loses_the_answer(self, engine: str) -> bool:
        """Whether it missed most of what it was asked: one miss may be the model's."""
        hits, asked = self.found(engine)
        return 2 * hits < asked


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast `engine` was as `base`; `base` None where no peer is left."""

    depth: int
    phase: Phase
    engine: str
    base: str | None
    spread: Spread | None


def per_token_ms(speed: Speed, phase: Phase) -> float:
    return speed.prefill_ms if phase == "prefill" else speed.decode_ms


def tokens_per_second(speeds: Sequence[Speed], phase: Phase) -> Spread:
    return Spread.of([1e3 / per_token_ms(speed, phase) for speed in speeds])


def ratio(own: Sequence[Speed], base: Sequence[Speed], phase: Phase) -> Spread:
    """Times as fast, round by round: what slowed a round down slowed both sides of its ratio."""
    pairs = zip(own, base, strict=True)
    return Spread.of([per_token_ms(b, phase) / per_token_ms(a, phase) for a, b in pairs])


def best(by_engine: Mapping[str, Sequence[Speed]], names: Sequence[str], phase: Phase) -> str:
    """The fastest of `names` by its median; the first among equals."""
    return max(names, key=lambda name: tokens_per_second(by_engine[name], phase).median)


def ratios(comparison: Comparison, *, base: str | None = None) -> list[Ratio]:
    """Ours against `base`, or at each depth and phase against the best peer that answers."""
    own = [engine.name for engine in comparison.engines if not engine.is_peer]
    peers = [engine.name for engine in comparison.engines if engine.is_peer]
    rows = []
    for depth, by_engine in comparison.speeds.items():
        for phase in PHASES:
            candidates = [
                name
                for name in ([base] if base else peers)
                if by_engine.get(name) and (base or not comparison.loses_the_answer(name))
            ]
            against = best(by_engine, candidates, phase) if candidates else None
            for name in own:
                if not by_engine.get(name):
                    continue
                spread = ratio(by_engine[name], by_engine[against], phase) if against else None
                rows.append(
                    Ratio(depth=depth, phase=phase, engine=name, base=against, spread=spread)
                )
    return rows
