"""Rotation angles: hand values, and rows whose bits depend on their position alone."""

import math
from typing import Any

import numpy as np
import pytest

from kvsieve.errors import ShapeError
from kvsieve.models.rope import RopeScaling, RopeTable, rope_tables


def test_angles_by_hand() -> None:
    cos, sin = rope_tables(np.array([0, 1, 8000]), rope_dim=4, theta=10000.0)
    assert cos.dtype == sin.dtype == np.float32
    for row, position in enumerate((0, 1, 8000)):
        for pair, frequency in enumerate((1.0, 0.01)):
            assert cos[row, pair] == np.float32(math.cos(position * frequency))
            assert sin[row, pair] == np.float32(math.sin(position * frequency))


def test_far_positions_keep_float64_angles() -> None:
    # In float32 the angle 123456.0 * 0.9... is off by up to .004 radians.
    cos, _ = rope_tables(np.array([123457]), rope_dim=128, theta=5e5)
    for pair in range(64):
        angle = 123457 * 5e5 ** (-2 * pair / 128)
        assert cos[0, pair] == pytest.approx(math.cos(angle), abs=1e-7)


def test_factors_divide_the_frequencies() -> None:
    factors = np.array([1.0, 8.0], np.float32)
    _, sin = rope_tables(np.array([100]), rope_dim=4, theta=10000.0, factors=factors)
    assert sin[0, 0] == np.float32(math.sin(100.0))
    assert sin[0, 1] == np.float32(math.sin(100 * 0.01 / 8))
    with pytest.raises(ShapeError, match="factors"):
        rope_tables(np.array([1]), rope_dim=4, theta=1e4, factors=np.ones(3, np.float32))


def test_table_rows_do_not_depend_on_what_was_asked_with_them() -> None:
    positions = np.array([0, 5, 1023, 1024, 2050, 31])
    whole = RopeTable(rope_dim=20, theta=1e5).rows(np.arange(2051))
    one_by_one = RopeTable(rope_dim=20, theta=1e5)
    for position in positions:
        for got, want in zip(one_by_one.rows(np.array([position])), whole, strict=True):
            assert got.flags.c_contiguous
            assert got.tobytes() == want[position].tobytes()
    expected = rope_tables(positions, rope_dim=20, theta=1e5)
    for got, want in zip(one_by_one.rows(positions), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=6e-8)


def test_table_is_computed_in_whole_aligned_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # A vectorised cosine may round its tail differently: only chunks of one shape are safe.
    asked: list[tuple[int, int]] = []

    def spy(positions: np.ndarray, **options: Any) -> Any:
        asked.append((int(positions[0]), len(positions)))
        return rope_tables(positions, **options)

    monkeypatch.setattr("kvsieve.models.rope.rope_tables", spy)
    table = RopeTable(rope_dim=8, theta=1e4)
    for position in (3, 1023, 3000, 1024):
        table.rows(np.array([position]))
    assert asked == [(0, 1024), (1024, 1024), (2048, 1024)]


def test_table_gives_copies_and_refuses_negative_positions() -> None:
    table = RopeTable(rope_dim=8, theta=1e4)
    cos, _ = table.rows(np.array([3]))
    cos[:] = 7
    assert table.rows(np.array([3]))[0].max() <= 1
    assert table.rows(np.array([], np.int64))[0].shape == (0, 4)
    with pytest.raises(ShapeError, match="-1"):
        table.rows(np.array([4, -1]))


# -- scaling ---------------------------------------------------------------------------------


def frequencies(scaling: RopeScaling, *, rope_dim: int, theta: float) -> np.ndarray:
    """What an angle grows by per position, from the table itself (small angles)."""
    _, sin = rope_tables(np.array([1]), rope_dim=rope_dim, theta=theta, scaling=scaling)
    return np.arcsin(sin[0].astype(np.float64) / scaling.amplitude)


def test_linear_scaling_divides_every_angle() -> None:
    scaling = RopeScaling(kind="linear", factor=4.0)
    got = frequencies(scaling, rope_dim=8, theta=10000.0)
    np.testing.assert_allclose(got, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-5)


def test_llama3_scaling_by_hand() -> None:
    """Theta 10000 over 8 dimensions: wavelengths 2 pi times 1, 10, 100, 1000. In 250 positions
    these turn 39.8, 3.98, .398, .0398 times: kept, nearly kept (3.98 of 1..4), divided, divided.
    """
    scaling = RopeScaling(kind="llama3", factor=8.0, original_context=250)
    got = frequencies(scaling, rope_dim=8, theta=10000.0)
    turns = 250 / (2 * np.pi * 10)
    smooth = (turns - 1) / 3
    want = [1.0, 0.1 * (smooth + (1 - smooth) / 8), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_yarn_scaling_by_hand() -> None:
    """Theta 10000 over 64 dimensions: pair i turns 2048 / (2 pi 10000**(i/32)) times in 2048.
    32 turns are at pair 8.06, 1 turn is at 20.1: pairs up to 8 are kept, from 21 on divided.
    """
    scaling = RopeScaling(kind="yarn", factor=16.0, original_context=2048)
    got = frequencies(scaling, rope_dim=64, theta=10000.0)
    plain = 10000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(got[:9], plain[:9], rtol=1e-5)
    np.testing.assert_allclose(got[21:], plain[21:] / 16, rtol=1e-5)
    share = (15 - 8) / (21 - 8)
    assert got[15] == pytest.approx(plain[15] * (1 - share) + plain[15] / 16 * share, rel=1e-5)
    assert scaling.amplitude == pytest.approx(0.1 * np.log(16) + 1)
    cos, _ = rope_tables(np.array([0]), rope_dim=64, theta=10000.0, scaling=scaling)
    np.testing.assert_allclose(cos, 1.2772589, rtol=1e-6)
    assert RopeScaling(kind="yarn", factor=16.0, attention_factor=1.5).amplitude == 1.5
    assert RopeScaling(kind="yarn", factor=0.5).amplitude == 1.0
