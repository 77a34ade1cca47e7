"""`EvenSelector.pick`: guards in their order of precedence, then scores; importance is ignored."""

import numpy as np
import pytest

from kvsieve.attention.selectors.even import EvenSelector

SCORES = np.array([-9, 4, 3, 4, -9, -9], dtype=np.float32)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [5]),
        (2, [0, 5]),
        (3, [0, 4, 5]),
        (4, [0, 1, 4, 5]),
        (5, [0, 1, 3, 4, 5]),
        (9, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_pick(k: int, expected: list[int]) -> None:
    mass = np.array([0, 0, 9, 0, 0, 0], dtype=np.int64)
    assert EvenSelector(k=k).pick(SCORES, mass).tolist() == expected


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_guards_that_coincide_take_one_place(num_blocks: int) -> None:
    assert EvenSelector(k=3).pick(SCORES[:num_blocks], None).tolist() == list(range(num_blocks))
