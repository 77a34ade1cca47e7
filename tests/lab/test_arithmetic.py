"""The values of the lesson, computed by hand; the formulas against counting."""

import pytest

from kvsieve.errors import ConfigError
from kvsieve.lab.arithmetic import (
    attention_flop,
    attention_speedup_ratio,
    causal_pairs,
    loaded_tokens,
    other_ms,
    reach_tokens,
    score_flop,
    vector_bytes,
    whole_speedup_ratio,
    window_pairs,
)

FASTER = {"attention_ms": 2.0, "select_ms": 0.35, "gather_ms": 0.25, "sparse_ms": 0.50}
SLOWER = {"attention_ms": 1.4, "select_ms": 0.7, "gather_ms": 0.6, "sparse_ms": 0.4}


def test_a_window_over_4096_tokens() -> None:
    assert window_pairs(4096, width_tokens=256) == 1_015_936
    assert causal_pairs(4096) == 8_390_656
    assert causal_pairs(4096) / window_pairs(4096, width_tokens=256) == pytest.approx(
        8.26, abs=5e-3
    )


@pytest.mark.parametrize(("n", "width"), [(8, 3), (1, 1), (7, 7), (5, 9), (40, 32)])
def test_pairs_are_what_counting_gives(n: int, width: int) -> None:
    windows = sum(len(range(max(0, i - width + 1), i + 1)) for i in range(n))
    assert window_pairs(n, width_tokens=width) == windows
    assert causal_pairs(n) == sum(range(1, n + 1))


def test_eight_tokens_and_a_window_of_three() -> None:
    assert window_pairs(8, width_tokens=3) == 1 + 2 + 6 * 3 == 21


def test_four_window_layers_reach_nine_positions() -> None:
    assert reach_tokens(4, width_tokens=3) == 9


def test_three_targets_load_twelve_tokens() -> None:
    assert loaded_tokens({1, 6, 14}, n_tokens=16, block_tokens=4) == 12
    assert loaded_tokens({1, 2, 3}, n_tokens=16, block_tokens=4) == 4
    assert loaded_tokens({9}, n_tokens=10, block_tokens=4) == 2


def test_one_head_at_32768_tokens() -> None:
    assert attention_flop(1024, head_dim=128) == 524_288
    assert attention_flop(32768, head_dim=128) == 16_777_216
    keys_and_values = 2
    assert keys_and_values * vector_bytes(1024, dims=128) == 512 * 2**10
    assert keys_and_values * vector_bytes(32768, dims=128) == 16 * 2**20
    assert vector_bytes(32768, dims=16) == 2**20
    assert score_flop(32768, dims=16) == 2 * 16 * 32768


def test_a_selector_that_pays() -> None:
    assert attention_speedup_ratio(**FASTER) == pytest.approx(1.82, abs=5e-3)
    assert whole_speedup_ratio(**FASTER, other_ms=6) == pytest.approx(8.0 / 7.1)
    assert round(whole_speedup_ratio(**FASTER, other_ms=6), 2) == 1.13


def test_a_selector_that_does_not() -> None:
    assert attention_speedup_ratio(**SLOWER) == pytest.approx(1.4 / 1.7)


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[speedup\] sparse: .*got 0"):
        attention_speedup_ratio(attention_ms=1, select_ms=0, gather_ms=0, sparse_ms=0)


@pytest.mark.parametrize(("total", "attention"), [(52.5, 9.7), (92.3, 48.9), (155.2, 110.7)])
def test_what_attention_leaves_is_near_43_ms(total: float, attention: float) -> None:
    assert other_ms(total, attention_ms=attention) == pytest.approx(43.6, abs=1)
