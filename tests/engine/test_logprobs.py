import math

import numpy as np
import pytest

from kvsieve.engine.logprobs import token_logprobs


def test_hand_values():
    logits = np.log(np.asarray([1.0, 4.0, 2.0, 1.0], np.float32))
    found = token_logprobs(logits, 0, top=2)
    assert found.logprob == pytest.approx(math.log(1 / 8), abs=1e-6)
    assert [one.token_id for one in found.top] == [1, 2]
    assert [one.logprob for one in found.top] == pytest.approx(
        [math.log(4 / 8), math.log(2 / 8)], abs=1e-6
    )


def test_ties_go_to_the_lower_id_and_more_than_there_are_is_all():
    found = token_logprobs(np.zeros(3, np.float32), 2, top=9)
    assert [one.token_id for one in found.top] == [0, 1, 2]
    assert found.logprob == pytest.approx(-math.log(3))


def test_none_asked_for():
    assert token_logprobs(np.zeros(3, np.float32), 1, top=0).top == ()


def test_large_logits_do_not_overflow():
    found = token_logprobs(np.asarray([1e4, 1e4 - 1], np.float32), 1, top=1)
    assert found.logprob == pytest.approx(-1 - math.log1p(math.exp(-1)), abs=1e-6)
