import numpy as np
import pytest

from kvsieve.engine.penalties import LogitBias, Penalties


def penalties(**changes: float) -> Penalties:
    settings = {"last_n": 64, "repeat": 1.0, "frequency": 0.0, "presence": 0.0, **changes}
    return Penalties(**settings)  # type: ignore[arg-type]


def applied(penalty: Penalties | LogitBias, logits: list[float]) -> list[float]:
    values = np.asarray(logits, np.float32)
    penalty.apply(values)
    return values.tolist()


def test_repeat_divides_what_is_positive_and_multiplies_what_is_not():
    penalty = penalties(repeat=2.0, seen=[0, 1, 1])
    assert applied(penalty, [4.0, -3.0, 5.0]) == [2.0, -6.0, 5.0]


def test_frequency_counts_and_presence_does_not():
    penalty = penalties(frequency=0.5, presence=0.25, seen=[2, 2, 2, 0])
    assert applied(penalty, [1.0, 1.0, 1.0]) == [0.25, 1.0, -0.75]


def test_a_negative_penalty_favours_what_was_said():
    assert applied(penalties(presence=-1.0, seen=[1]), [0.0, 0.0]) == [0.0, 1.0]


def test_only_the_last_tokens_count():
    penalty = penalties(last_n=2, presence=1.0)
    for token in (0, 1, 1, 2):
        penalty.accept(token)
    assert applied(penalty, [0.0, 0.0, 0.0, 0.0]) == [0.0, -1.0, -1.0, 0.0]


def test_minus_one_looks_back_on_everything_and_zero_on_nothing():
    everything = penalties(last_n=-1, frequency=1.0, seen=range(100))
    assert applied(everything, [0.0] * 101) == [-1.0] * 100 + [0.0]
    assert applied(penalties(last_n=0, frequency=1.0, seen=[0, 1]), [0.0, 0.0]) == [0.0, 0.0]


def test_a_banned_token_stays_banned():
    assert applied(penalties(repeat=0.5, frequency=-2.0, seen=[0]), [-np.inf]) == [-np.inf]


def test_a_bias_is_added_and_minus_infinity_bans():
    bias = LogitBias({2: 1.5, 0: -np.inf})
    assert applied(bias, [1.0, 2.0, 3.0]) == [pytest.approx(-np.inf), 2.0, 4.5]
