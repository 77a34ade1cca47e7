"""Rotation angles: hand values, and rows whose bits depend on their position alone."""

import math
from typing import Any

import numpy as np
import pytest

from kvsieve.errors import ShapeError
from kvsieve.models.rope import RopeTable, rope_tables


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
