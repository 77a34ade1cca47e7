import pytest

from kvsieve.errors import ConfigError
from kvsieve.lab.speedup import PartTimes, Rest

FASTER = PartTimes(attention_ms=2.0, select_ms=0.35, gather_ms=0.25, sparse_ms=0.5, other_ms=6)
SLOWER = PartTimes(attention_ms=1.4, select_ms=0.7, gather_ms=0.6, sparse_ms=0.4)


def test_faster() -> None:
    assert round(FASTER.attention_speedup_ratio, 2) == 1.82
    assert round(FASTER.whole_speedup_ratio, 2) == 1.13
    assert FASTER.replacement_ms == pytest.approx(1.10)
    assert FASTER.best_whole_ratio == pytest.approx(8 / 6)
    assert FASTER.attack_first == "sparse attention"


def test_slower_and_what_to_attack() -> None:
    assert SLOWER.attention_speedup_ratio == pytest.approx(1.4 / 1.7)
    assert SLOWER.attack_first == "selection"
    assert SLOWER.best_whole_ratio is None


def test_the_first_of_equal_parts() -> None:
    times = PartTimes(attention_ms=1, select_ms=0.1, gather_ms=0.3, sparse_ms=0.3)
    assert times.attack_first == "gathering"


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_ms": 0},
        {"select_ms": -1},
        {"sparse_ms": float("nan")},
        {"other_ms": float("inf")},
    ],
)
def test_impossible_times(changes: dict) -> None:
    with pytest.raises(ConfigError, match=r"\[PartTimes\] "):
        PartTimes(**({"attention_ms": 1, "select_ms": 1, "sparse_ms": 1} | changes))


def test_an_exact_replacement_of_nothing() -> None:
    with pytest.raises(ConfigError, match="got 1 and 0"):
        PartTimes(attention_ms=1, select_ms=0, sparse_ms=0)


def test_the_original_s_tokens_leave_a_constant() -> None:
    """Its model on its board, at 506, 2,046 and 4,059 tokens: total and attention in ms."""
    rest = Rest.of([52.5, 92.3, 155.2], [9.7, 48.9, 110.7])
    assert rest.other_ms == pytest.approx((42.8, 43.4, 44.5))
    assert rest.mean_ms == pytest.approx(43.6, abs=0.05)
    assert rest.spread < 0.025


def test_rest_wants_pairs() -> None:
    for totals, attention in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(ConfigError, match="as many as attention times"):
            Rest.of(totals, attention)
