"""Operations whose rounding is fixed, against float64 and exact integers."""

import numpy as np
import pytest

from kvsieve.kernels.reference.arithmetic import exp, float_dot, fma, int_dot


def test_fma_rounds_once() -> None:
    a = np.float32(1 + 2**-12)
    # a * a = 1 + 2**-11 + 2**-24; rounding the product first would lose the last term.
    assert fma(a, a, np.float32(-1 - 2**-11)) == np.float32(2**-24)


def test_exp_floor() -> None:
    x = np.array([0, -1, -87, -87.1, -1e30, -np.inf], dtype=np.float32)
    got = exp(x)
    np.testing.assert_allclose(got[:3], np.exp(x[:3].astype(np.float64)), rtol=3e-7)
    assert got[3:].tolist() == [0, 0, 0]
    assert got.dtype == np.float32


def test_float_dot_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((5, 33), dtype=np.float32)
    k = rng.standard_normal((70, 33), dtype=np.float32)
    whole = float_dot(q, k)
    np.testing.assert_allclose(whole, q.astype(np.float64) @ k.T, rtol=1e-5, atol=1e-5)
    for row in range(5):
        assert np.array_equal(float_dot(q[row : row + 1], k[7:9])[0], whole[row, 7:9])


@pytest.mark.parametrize("width", [32, 256, 4096])
def test_int_dot_is_exact(width) -> None:
    a = np.full((2, width), 255, dtype=np.uint8)
    b = np.full((3, width), -128, dtype=np.int8)
    b[:, -1] = 127
    want = 255 * (-128 * (width - 1) + 127)
    assert (int_dot(a, b) == np.float32(want)).all()
    if abs(want) < 2**24:
        assert int(int_dot(a, b)[0, 0]) == want
