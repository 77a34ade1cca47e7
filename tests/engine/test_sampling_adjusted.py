"""What changes logits before a token is chosen: bans, biases, constraints, penalties."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvsieve.engine.sampling import Sampler, SamplingParams
from kvsieve.errors import ConfigError, NumericalError

LOGITS = np.asarray([1.0, 3.0, 2.0, 0.5], np.float32)


def greedy(
    params: SamplingParams, *, said: Sequence[int] = (), count: int = 1, end_ids: Sequence[int] = ()
) -> list[int]:
    sampler = Sampler(params, prompt_ids=said, end_ids=end_ids)
    tokens = []
    for _ in range(count):
        tokens.append(sampler.sample(LOGITS))
        sampler.accept(tokens[-1])
    return tokens


def test_nothing_asked_for_changes_nothing():
    assert greedy(SamplingParams(), said=[1, 1, 1], count=3) == [1, 1, 1]


def test_each_penalty_sees_the_prompt_and_what_was_drawn():
    assert greedy(SamplingParams(presence_penalty=1.5), said=[1]) == [2]
    assert greedy(SamplingParams(repeat_penalty=2.0), said=[1]) == [2]
    # 3, 2, 1, .5 less .75 per time said: 1 at 3, then 2.25, then 2 at 2, then 1 at 1.5 ...
    assert greedy(SamplingParams(frequency_penalty=0.75), count=4) == [1, 1, 2, 1]


def test_the_window_of_the_penalties():
    params = SamplingParams(presence_penalty=5.0, repeat_last_n=1)
    assert greedy(params, count=4) == [1, 2, 1, 2]
    assert greedy(SamplingParams(presence_penalty=5.0, repeat_last_n=0), said=[1]) == [1]


def test_a_bias_comes_before_the_penalties():
    # 1 + 4 = 5 is the best; as a token that was said it is halved, to 2.5: below 3.
    params = SamplingParams(logit_bias={0: 4.0}, repeat_penalty=2.0)
    assert greedy(params) == [0]
    assert greedy(params, said=[0]) == [1]


def test_minus_infinity_bans():
    assert greedy(SamplingParams(logit_bias={1: -np.inf})) == [2]
    drawn = SamplingParams(logit_bias={1: -np.inf, 2: -np.inf}, temperature=5.0, seed=3)
    assert set(greedy(drawn, count=50)) == {0, 3}


def test_end_tokens_are_not_drawn_too_early():
    assert greedy(SamplingParams(min_tokens=2), count=4, end_ids=[1]) == [2, 2, 1, 1]
    assert greedy(SamplingParams(ignore_eos=True), count=2, end_ids=[1, 2]) == [0, 0]


def test_banning_every_token_is_an_error():
    params = SamplingParams(logit_bias=dict.fromkeys(range(4), -np.inf))
    with pytest.raises(NumericalError, match="finite maximum"):
        greedy(params)


def test_the_logits_are_not_changed():
    before = LOGITS.copy()
    greedy(SamplingParams(logit_bias={1: -np.inf}, presence_penalty=1), said=[0], count=3)
    assert np.array_equal(before, LOGITS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"repeat_penalty": 0},
        {"repeat_penalty": 1e-300},
        {"repeat_penalty": -1},
        {"repeat_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"presence_penalty": "1"},
        {"presence_penalty": True},
        {"repeat_last_n": -2},
        {"repeat_last_n": 1.5},
        {"min_tokens": -1},
        {"logprobs": -1},
        {"logprobs": True},
        {"logit_bias": [(1, 2)]},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"1": 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: None}},
        {"constraint": {"type": "object"}},
    ],
)
def test_values_out_of_range(wrong: dict[str, object]):
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"\[SamplingParams\] {name}: expected"):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_a_bias_on_a_token_that_is_none():
    with pytest.raises(ConfigError, match="token ids from 0 to 9, got 10"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    SamplingParams(logit_bias={9: 1.0}).check_vocabulary(10)
