"""Balanced norms: scores stay what they are, and rows quantise better."""

import numpy as np
import pytest

from kvsieve.models.balance import balanced_norms
from kvsieve.models.rope import rope_tables

DIM = 64


def norms(*, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights near 2, but for a few channels of the keys that are twenty times as large."""
    rng = np.random.default_rng(seed)
    q, k = rng.uniform(1, 3, (2, DIM)).astype(np.float32)
    k[[3, 50]] *= 20
    return q, k


def rotated(x: np.ndarray, positions: np.ndarray, rope_dim: int, interleaved: bool) -> np.ndarray:
    """Rope in float64, by the definition of a rotation of two channels."""
    cos, sin = rope_tables(positions, rope_dim=rope_dim, theta=10000.0)
    out = x.astype(np.float64)
    for pair in range(rope_dim // 2):
        first = 2 * pair if interleaved else pair
        second = first + 1 if interleaved else pair + rope_dim // 2
        a, b = out[:, first].copy(), out[:, second].copy()
        out[:, first] = a * cos[:, pair] - b * sin[:, pair]
        out[:, second] = a * sin[:, pair] + b * cos[:, pair]
    return out


def int8_rows(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    return np.rint(x / scale) * scale


@pytest.mark.parametrize("rope_dim", [DIM, 32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_behind_rope_stay_the_same(rope_dim: int, interleaved: bool) -> None:
    rng = np.random.default_rng(1)
    q_norm, k_norm = norms()
    balanced = balanced_norms(q_norm, k_norm, rope_dim=rope_dim, interleaved=interleaved)
    q, k = rng.standard_normal((2, 20, DIM))
    positions = np.arange(20) * 37

    def scores(q_weight: np.ndarray, k_weight: np.ndarray, *, rounded: bool = False) -> np.ndarray:
        left = rotated(q * q_weight, positions, rope_dim, interleaved)
        right = rotated(k * k_weight, positions, rope_dim, interleaved)
        return int8_rows(left) @ int8_rows(right).T if rounded else left @ right.T

    want = scores(q_norm, k_norm)
    np.testing.assert_allclose(scores(*balanced), want, rtol=0, atol=1e-10)
    before = np.abs(scores(q_norm, k_norm, rounded=True) - want).mean()
    after = np.abs(scores(*balanced, rounded=True) - want).mean()
    assert after < 0.7 * before


def test_factors_are_powers_of_two_that_even_out_what_differs() -> None:
    q_norm, k_norm = norms()
    q, k = balanced_norms(q_norm, k_norm, rope_dim=DIM, interleaved=False)
    factors = q / q_norm
    assert np.array_equal(np.log2(factors), np.rint(np.log2(factors)))
    np.testing.assert_array_equal(k_norm / k, factors)  # in float32 nothing is rounded
    np.testing.assert_array_equal(factors[:32], factors[32:])
    assert factors[3] > factors[4]
    # A pair's sizes differ by at most the rounding of the exponent: half a step each way, twice.
    q_pairs, k_pairs = (np.hypot(x[:32], x[32:]) for x in (q, k))
    assert np.abs(np.log2(q_pairs / k_pairs)).max() <= 1


def test_channels_without_weight_and_signs_stay() -> None:
    q_norm, k_norm = norms()
    q_norm[[0, 32]] = 0
    k_norm[[1, 33]] = 0
    k_norm[5] *= -1
    q, k = balanced_norms(q_norm, k_norm, rope_dim=DIM, interleaved=False)
    assert np.isfinite(q).all()
    assert np.isfinite(k).all()
    unknown = [0, 1, 32, 33]
    np.testing.assert_array_equal(q[unknown], q_norm[unknown])
    np.testing.assert_array_equal(k[unknown], k_norm[unknown])
    assert np.array_equal(np.sign(k), np.sign(k_norm))
