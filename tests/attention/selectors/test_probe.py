"""`ProbeSelector.pick`: half of the budget by importance, the rest by score, then recency."""

import numpy as np
import pytest

from kvsieve.attention.selectors.probe import ProbeSelector

SCORES = np.array([5, 4, 3, 2, 1, 0], dtype=np.float32)
MASS = np.array([0, 0, 0, 7, 9, 0], dtype=np.int64)


@pytest.mark.parametrize(
    ("k", "with_mass", "without"),
    [
        (1, [4], [5]),
        (2, [4, 5], [0, 5]),
        (3, [3, 4, 5], [0, 1, 5]),
        (4, [0, 3, 4, 5], [0, 1, 2, 5]),
        (6, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        (99, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_pick(k: int, with_mass: list[int], without: list[int]) -> None:
    selector = ProbeSelector(k=k)
    assert selector.pick(SCORES, MASS).tolist() == with_mass
    assert selector.pick(SCORES, None).tolist() == without
