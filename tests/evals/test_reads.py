"""Bytes that choosing reads, by selector: hand values at 8-bit keys of 64 values."""

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.attention.selectors.window import WindowSelector
from kvsieve.evals.reads import choose_bytes
from kvsieve.kernels.layout import PageLayout

KEY, TOKENS = 64 + 4, 6400


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("even", KEY / 4),
        ("probe", KEY / 4 + 8 / 3),
        # Of 64 blocks looked at, 32 are looked at in vain.
        ("anchors", (3 * KEY + 16) / 32 + 32 * 32 * KEY / TOKENS),
        ("minmax", 2 * KEY / 32),
        ("meanstd", 2 * KEY / 32),
        ("mean", KEY / 32),
        ("oracle", KEY),
        ("window", 0),
        ("random", 0),
    ],
)
def test_by_selector(selector: str, expected: float) -> None:
    layout = PageLayout(k_type="q8_0", v_type="q8_0", head_dim=64)
    sparse = SparseAttention(selector=selector)  # type: ignore[arg-type]
    assert choose_bytes(sparse, layout, num_kv_heads=3, num_tokens=TOKENS) == pytest.approx(
        expected
    )


def test_a_rule_in_python_is_given_every_key() -> None:
    layout = PageLayout(k_type="f16", v_type="f16", head_dim=64)
    sparse = SparseAttention(rule=WindowSelector())
    assert choose_bytes(sparse, layout, num_kv_heads=3, num_tokens=TOKENS) == 2 * 64


@pytest.mark.parametrize(("tokens", "in_vain"), [(6400, 32), (40 * 32, 8), (1000, 0)])
def test_keys_that_anchors_looks_at_in_vain(tokens: int, in_vain: int) -> None:
    layout = PageLayout(k_type="q8_0", v_type="q8_0", head_dim=64)
    got = choose_bytes(SparseAttention(k=32), layout, num_kv_heads=3, num_tokens=tokens)
    assert got == pytest.approx((3 * KEY + 16) / 32 + in_vain * 32 * KEY / tokens)
