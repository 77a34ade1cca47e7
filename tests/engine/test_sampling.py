"""Case SMP-01: sampler edges; and the filters against a plain float64 computation."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.engine.sampling import Sampler, SamplingParams, sample_rows
from kvsieve.errors import ConfigError, NumericalError, ShapeError

THREE = np.array([1, 3, 2], np.float32)


def draws(logits: np.ndarray, count: int = 200, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**{"seed": 7, "temperature": 1, **params}))
    return [sampler.sample(logits) for _ in range(count)]


def allowed(logits: np.ndarray, *, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> list[int]:
    """Ids that may be drawn: the rules in float64, one token after the other."""
    kept = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if top_k > 0:
        kept = kept[:top_k]
    best = float(logits[kept[0]])
    if top_p < 1:
        total = sum(np.exp(float(logits[i]) - best) for i in kept)
        mass, count = 0.0, 0
        while count == 0 or (mass < top_p * total and count < len(kept)):
            mass += np.exp(float(logits[kept[count]]) - best)
            count += 1
        kept = kept[:count]
    return sorted(i for i in kept if np.exp(float(logits[i]) - best) >= min_p)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": 1e-320},
        {"temperature": 5e-324},
        {"top_p": 0},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"min_p": 1},
    ],
)
def test_settings_that_leave_the_best_alone(params: dict[str, Any]) -> None:
    assert set(draws(THREE, **params)) == {1}


@pytest.mark.parametrize(
    "params",
    [
        {},
        *({"top_k": k} for k in (0, -1, None, 3, 10**9)),
        {"top_p": 1},
        {"min_p": 0},
        {"temperature": 1e300},
    ],
)
def test_settings_that_filter_nothing(params: dict[str, Any]) -> None:
    assert set(draws(THREE, **params)) == {0, 1, 2}


def test_greedy_ties_go_to_the_lowest_id() -> None:
    tied = np.array([1, 3, 3, 3, 0], np.float32)
    assert set(draws(tied, temperature=0)) == {1}
    assert set(draws(tied, top_k=1)) == {1}
    assert set(draws(tied, top_p=0)) == {1}
    assert set(draws(tied, top_k=2)) == {1, 2}
    # Tokens as probable as the best are none of them below min_p = 1.
    assert set(draws(tied, min_p=1)) == {1, 2, 3}
    assert set(draws(tied, temperature=1e-320)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"temperature": -1}, "temperature: expected a number of at least 0, got -1"),
        ({"temperature": float("nan")}, "temperature: .*got nan"),
        ({"temperature": float("inf")}, "temperature: .*got inf"),
        ({"temperature": 10**400}, "temperature: .*got 1000"),
        ({"temperature": "1"}, "temperature: .*got '1'"),
        ({"temperature": True}, "temperature: .*got True"),
        ({"top_p": 1.5}, "top_p: expected a number from 0 to 1, got 1.5"),
        ({"top_p": -0.1}, "top_p: .*got -0.1"),
        ({"top_p": float("nan")}, "top_p: .*got nan"),
        ({"min_p": 2}, "min_p: .*got 2"),
        ({"min_p": float("nan")}, "min_p: .*got nan"),
        ({"top_k": -2}, "top_k: expected an integer of at least -1, got -2"),
        ({"top_k": 1.5}, "top_k: .*got 1.5"),
        ({"top_k": True}, "top_k: .*got True"),
        ({"seed": -2}, "seed: expected an integer from -1 to 18446744073709551615, got -2"),
        ({"seed": 2**64}, "seed: .*got 18446744073709551616"),
        ({"max_tokens": -1}, "max_tokens: expected an integer of at least 0, got -1"),
        ({"max_tokens": 2.5}, "max_tokens: .*got 2.5"),
        ({"max_tokens": "5"}, "max_tokens: .*got '5'"),
        ({"ignore_eos": 1}, "ignore_eos: expected True or False, got 1"),
        ({"stop": [""]}, "stop: expected strings that are not empty"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SamplingParams(**params)


def test_params_take_numpy_numbers_and_normalise_stops() -> None:
    params = SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5), stop="x")
    assert (params.stop, params.stops) == (("x",), ("x",))
    assert SamplingParams(stop=None).stops == SamplingParams(stop=[]).stops == ()
    assert Sampler(params).sample(THREE) in (0, 1, 2)


def test_a_seed_repeats_and_a_drawn_one_is_reported() -> None:
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert draws(logits, seed=5) == draws(logits, seed=5) != draws(logits, seed=6)
    assert len(set(draws(logits, seed=5))) > 50
    for seed in (None, -1):
        sampler = Sampler(SamplingParams(seed=seed, temperature=1))
        again = Sampler(SamplingParams(seed=sampler.seed, temperature=1))
        assert [sampler.sample(logits) for _ in range(20)] == [
            again.sample(logits) for _ in range(20)
        ]
    assert Sampler(SamplingParams()).seed != Sampler(SamplingParams()).seed
    assert Sampler(SamplingParams(seed=2**64 - 1)).seed == 2**64 - 1


def test_drawn_frequencies_are_the_probabilities() -> None:
    logits = np.array([0, 1, -np.inf, 2, 0.5], np.float32)
    for temperature in (0.5, 1, 3):
        weights = np.exp(logits.astype(np.float64) / temperature)
        expected = weights / weights.sum()
        counts = np.bincount(draws(logits, 4000, temperature=temperature), minlength=5) / 4000
        # Four standard deviations of a frequency over 4000 draws is at most .032.
        np.testing.assert_allclose(counts, expected, atol=0.032)
        assert counts[2] == 0


def test_top_p_takes_no_token_beyond_the_mass_asked_for() -> None:
    # Four equal tokens: two have exactly half of the mass, which is enough.
    assert set(draws(np.zeros(4, np.float32), top_p=0.5)) == {0, 1}


def test_temperature_comes_last() -> None:
    # At temperature 1 the best token has .87 of the mass: top_p = .8 leaves it alone, however
    # flat the temperature would have made the distribution.
    logits = np.array([0, 2, 0, 0], np.float32) * 2
    assert set(draws(logits, top_p=0.8, temperature=100)) == {1}
    assert set(draws(logits, min_p=0.1, temperature=100)) == {1}


class _Always:
    """A generator that gives one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 700]] = 0.1
    sampler = Sampler(SamplingParams(temperature=1))
    for number, token in ((0.0, 3), (0.4999, 3), (0.5, 700), (np.nextafter(1, 0), 700), (1.0, 700)):
        sampler._random = _Always(number)  # type: ignore[assignment]
        assert sampler.sample(logits) == token


@st.composite
def some_logits(draw: st.DrawFn) -> np.ndarray:
    """Sizes on both sides of the span search, with many ties and some tokens excluded."""
    size = draw(st.sampled_from([1, 2, 7, 40, 513, 3000]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    step = draw(st.sampled_from([0.001, 0.5, 2]))
    logits = (np.round(rng.standard_normal(size) * 3 / step) * step).astype(np.float32)
    logits[rng.random(size) < draw(st.sampled_from([0, 0.5]))] = -np.inf
    logits[rng.integers(size)] = 4
    return logits


@given(
    logits=some_logits(),
    top_k=st.sampled_from([0, 1, 2, 40, 512, 600]),
    top_p=st.sampled_from([0, 0.3, 0.9, 0.9999, 1]),
    min_p=st.sampled_from([0, 0.01, 0.5]),
)
@settings(max_examples=150, deadline=None)
def test_filters_equal_the_plain_rules(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=1, seed=1, top_k=top_k, top_p=top_p, min_p=min_p)
    sampler, before = Sampler(params), logits.copy()
    kept = sampler._candidates(logits, float(logits.max()))
    got = range(logits.size) if kept is None else kept.tolist()
    expected = allowed(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    assert [i for i in got if np.isfinite(logits[i])] == [
        i for i in expected if np.isfinite(logits[i])
    ]
    assert sampler.sample(logits) in expected
    np.testing.assert_array_equal(logits, before)


def test_each_row_of_a_batch_is_drawn_as_if_alone() -> None:
    settings_of_rows = [
        SamplingParams(),
        SamplingParams(temperature=1, seed=3),
        SamplingParams(temperature=1e-320, seed=3),
        SamplingParams(temperature=0.7, seed=3, top_k=40, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=2, seed=3, top_p=0.99),
    ]
    steps = np.random.default_rng(1).standard_normal((30, 5, 2000)).astype(np.float32) * 3
    together = [Sampler(params) for params in settings_of_rows]
    batch = [sample_rows(logits, together) for logits in steps]
    for row, params in enumerate(settings_of_rows):
        alone = Sampler(params)
        assert [alone.sample(logits[row]) for logits in steps] == [ids[row] for ids in batch]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "bad", [[1, np.nan, 0], [np.nan] * 3, [1, np.inf, 0], [-np.inf] * 3, [np.inf, np.nan, 0]]
)
def test_logits_without_a_finite_maximum_are_refused(bad: list[float], temperature: float) -> None:
    with pytest.raises(NumericalError, match=r"\[sample\] logits: expected a finite maximum"):
        Sampler(SamplingParams(temperature=temperature)).sample(np.array(bad, np.float32))


@pytest.mark.parametrize(
    "bad", [np.zeros((1, 3), np.float32), np.zeros(0, np.float32), np.zeros(3, np.int32), [1.0]]
)
def test_logits_of_another_shape_are_refused(bad: Any) -> None:
    with pytest.raises(ShapeError, match=r"\[sample\] logits: expected float32 \(vocab\), got"):
        Sampler(SamplingParams()).sample(bad)


def test_a_batch_needs_a_sampler_per_row() -> None:
    with pytest.raises(ShapeError, match=r"\[sample_rows\] logits: expected \(1, vocab\)"):
        sample_rows(np.zeros((2, 3), np.float32), [Sampler(SamplingParams())])
