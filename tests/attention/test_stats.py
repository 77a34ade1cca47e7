"""Kept mass and output error on hand values (docs/selection.md, section 8)."""

import numpy as np
import pytest

from kvsieve.attention.stats import kept_mass, relative_error, summarize_kept_mass
from kvsieve.errors import ShapeError

PROBS = np.array([[[0.80, 0.15, 0.05]]])


@pytest.mark.parametrize(
    ("read", "expected"), [([0, 1], 0.95), ([1, 2], 0.20), ([0, 2], 0.85), ([0, 1, 2], 1.0)]
)
def test_missing_the_first_of_three_keys_costs_most(read: list[int], expected: float) -> None:
    mask = np.zeros((1, 3), dtype=bool)
    mask[0, read] = True
    assert kept_mass(PROBS, mask)[0, 0] == pytest.approx(expected)


def test_a_mask_per_kv_head_serves_its_group() -> None:
    probs = np.repeat(PROBS, 4, axis=0)
    mask = np.array([[[True, False, False]], [[False, False, True]]])
    assert kept_mass(probs, mask)[:, 0] == pytest.approx([0.8, 0.8, 0.05, 0.05])


def test_summary() -> None:
    summary = summarize_kept_mass(np.linspace(0.0, 1.0, 101)[None])
    assert summary.mean == pytest.approx(0.5)
    assert summary.p5 == pytest.approx(0.05)


def test_relative_error() -> None:
    exact = np.array([[3.0, 4.0], [0.0, 2.0]])
    out = np.array([[3.0, 4.5], [0.0, 2.0]])
    assert relative_error(out, exact) == pytest.approx([0.1, 0.0])


def test_shapes() -> None:
    with pytest.raises(ShapeError, match=r"\[kept_mass\] mask"):
        kept_mass(PROBS, np.ones((1, 2), dtype=bool))
    with pytest.raises(ShapeError, match=r"\[relative_error\] out"):
        relative_error(np.ones(2), np.ones(3))
