"""Vectors that stand for a block, and the scores that follow, against plain float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvsieve.errors import ConfigError
from kvsieve.kernels.layout import VectorLayout, VectorRule
from kvsieve.kernels.reference.quantize import quantize_q8
from kvsieve.kernels.reference.vectors import round_outward, summarize, vector_scores

RULES: tuple[VectorRule, ...] = ("minmax", "mean", "meanstd")


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_index_is_small() -> None:
    """4.25 and 2.125 bytes per token and KV head at head_dim 64; twice that, nearly, at 128."""
    per_token = [VectorLayout(head_dim=64, rule=rule).record_bytes / (16 * 32) for rule in RULES]
    assert per_token == [4.25, 2.125, 4.25]
    assert VectorLayout(head_dim=128, rule="minmax").record_bytes / (16 * 32) == 8.25


def test_an_index_has_a_rule() -> None:
    with pytest.raises(ConfigError, match=r"\[VectorLayout\] rule: expected one of minmax, mean"):
        VectorLayout(head_dim=64, rule="median")  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    x=arrays(
        np.float32,
        (1, 16),
        elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=True),
    ),
    up=st.booleans(),
)
def test_a_rounded_bound_is_a_bound_of_less_than_a_step(x: np.ndarray, up: bool) -> None:
    rows = round_outward(x, up=up)
    assert rows.scales is not None
    step = rows.scales.astype(np.float64)
    value = rows.values * step  # exact in float64
    beyond = value - x if up else x - value
    assert (beyond >= 0).all()
    assert (beyond <= step * (1 + 1e-6)).all()
    assert (np.abs(rows.values.astype(int)) <= 127).all()


@pytest.mark.parametrize("rule", RULES)
def test_scores_are_what_the_rule_says_of_what_is_stored(rule: VectorRule) -> None:
    keys, q = drawn(9, 32, 16), quantize_q8(drawn(5, 16, seed=1))
    stored = summarize(keys, rule).floats().astype(np.float64)
    first, last = stored[:, 0], stored[:, -1]
    query = q.floats().astype(np.float64)[:, None]
    expected = {
        "minmax": np.maximum(query * first, query * last),
        "mean": query * first,
        "meanstd": query * first + np.abs(query) * last,
    }[rule].sum(axis=2)
    got = vector_scores(q, summarize(keys, rule), rule)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_what_is_stored_is_within_a_step_of_the_statistics() -> None:
    keys = drawn(9, 32, 16)
    wide = keys.astype(np.float64)
    statistics = {
        "minmax": [wide.max(axis=1), wide.min(axis=1)],
        "mean": [wide.mean(axis=1)],
        "meanstd": [wide.mean(axis=1), wide.std(axis=1)],
    }
    for rule in RULES:
        rows = summarize(keys, rule)
        assert rows.scales is not None
        steps = rows.scales if rule == "minmax" else rows.scales / 2
        for entry, expected in enumerate(statistics[rule]):
            off = np.abs(rows.floats()[:, entry] - expected)
            assert (off <= steps[:, entry] * 1.001 + 1e-6).all()


def test_no_logit_exceeds_its_blocks_bound() -> None:
    """Up to the last rounding: keys in 8 bits, as the cache holds them, and a code of each kind."""
    keys = quantize_q8(drawn(200, 32, 16, seed=2) * drawn(200, 1, 1, seed=3))
    q = quantize_q8(np.concatenate([drawn(20, 16, seed=4), np.eye(16, dtype=np.float32)]))
    bound = vector_scores(q, summarize(keys.floats(), "minmax"), "minmax").astype(np.float64)
    logits = np.einsum("rd,btd->rbt", q.floats().astype(np.float64), keys.floats())
    slack = bound - logits.max(axis=2)
    assert (slack >= -1e-6 * np.abs(logits).max()).all()
    assert np.median(slack) > 0  # and bounds of many channels are loose
