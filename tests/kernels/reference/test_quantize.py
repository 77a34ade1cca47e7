"""Integer rows and their scales: hand values, error bounds, and case KVQ-01."""

import numpy as np
import pytest

from kvsieve.errors import NumericalError
from kvsieve.kernels.reference.quantize import (
    quantize_activations,
    quantize_q4,
    quantize_q8,
    quantize_rows,
)

KVQ_01 = {
    "all zero": np.zeros(32),
    "one 1e-8": np.eye(1, 32, 5)[0] * 1e-8,
    "all equal": np.full(32, 3.25),
    "all negative": -np.linspace(1, 2, 32),
    "one 1e7": np.eye(1, 32, 31)[0] * 1e7,
    "denormal": np.eye(1, 32, 3)[0] * 1e-44,
    "largest": np.full(32, np.finfo(np.float32).max),
}


@pytest.mark.parametrize("name", KVQ_01)
@pytest.mark.parametrize(("quantize", "steps"), [(quantize_q8, 0.5), (quantize_q4, 1.0)])
def test_kvq_01_error_bound(name, quantize, steps) -> None:
    x = KVQ_01[name].astype(np.float32)
    rows = quantize(x)
    step = np.abs(rows.scales.astype(np.float64))
    back = rows.values.astype(np.float64) * rows.scales
    assert np.isfinite(back).all()
    denormal_rounding = 127 * 1.5e-45
    assert (np.abs(back - x) <= steps * step * 1.00001 + denormal_rounding).all()


@pytest.mark.parametrize("quantize", [quantize_q8, quantize_q4])
def test_kvq_01_zero_row_is_exactly_zero(quantize) -> None:
    rows = quantize(np.zeros((2, 32), dtype=np.float32))
    assert not rows.values.any()
    assert not rows.scales.any()
    assert not np.signbit(rows.scales).any()


def test_kvq_01_tiny_and_huge_values_survive_because_scales_are_f32() -> None:
    for value in (1e-8, 1e7):
        x = np.zeros(32, dtype=np.float32)
        x[7] = value
        for rows in (quantize_q8(x), quantize_q4(x)):
            back = rows.values.astype(np.float32) * rows.scales
            assert back[7] == pytest.approx(value, rel=1e-6)
            assert np.count_nonzero(back) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0", "f16", "f32"])
def test_kvq_01_nan_is_an_error_that_names_the_argument(bad, cache_type) -> None:
    x = np.ones((3, 32), dtype=np.float32)
    x[1, 4] = bad
    with pytest.raises(NumericalError, match=r"\[append\] k: expected finite"):
        quantize_rows(x, cache_type, function="append", name="k")


def test_f16_refuses_what_it_cannot_hold() -> None:
    x = np.full((1, 16), 65504, dtype=np.float32)
    assert quantize_rows(x, "f16", function="append", name="v").values.dtype == np.float16
    x[0, 3] = 1e7
    with pytest.raises(NumericalError, match=r"\[append\] v: expected magnitudes up to 65504"):
        quantize_rows(x, "f16", function="append", name="v")


def test_q8_by_hand() -> None:
    # scale 2: halves go to the even neighbour (3/2 -> 2, 5/2 -> 2, 1/2 -> 0).
    x = np.array([[254, 3, 5, 1, -254, -3, 0, 7]], dtype=np.float32)
    rows = quantize_q8(x)
    assert rows.scales.tolist() == [[2.0]]
    assert rows.values.tolist() == [[127, 2, 2, 0, -127, -2, 0, 4]]


def test_q8_scale_is_per_row() -> None:
    x = np.array([[127.0, 1], [12.7, 0.1]], dtype=np.float32)
    rows = quantize_q8(x)
    np.testing.assert_allclose(rows.scales, [[1.0], [0.1]], rtol=1e-6)
    assert rows.values.tolist() == [[127, 1], [127, 1]]


def test_q4_by_hand() -> None:
    x = np.zeros(64, dtype=np.float32)
    x[:4] = [8, -7, -8, 2]  # the first of the two largest is +8: scale -1, codes mirrored
    x[32:36] = [-16, 15, 3, -5]  # largest is -16: scale 2; 15/2 clips at 7, 3/2 and 5/2 go to 2
    rows = quantize_q4(x)
    assert rows.scales.tolist() == [-1.0, 2.0]
    assert rows.values[:4].tolist() == [-8, 7, 7, -2]
    assert rows.values[32:36].tolist() == [-8, 7, 2, -2]


def test_activations_by_hand() -> None:
    x = np.zeros((1, 64), dtype=np.float32)
    x[0, :3] = [127, -1, 0.4]
    x[0, 32:34] = [-254, 3]
    act = quantize_activations(x)
    assert act.scales.tolist() == [[1.0, 2.0]]
    assert act.values[0, 0, :3].tolist() == [127, -1, 0]
    assert act.values[0, 1, :2].tolist() == [-127, 2]
    assert act.sums.tolist() == [[126.0, -250.0]]


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 7e-31])
def test_activations_too_small_to_invert_are_zero(amax) -> None:
    x = np.zeros((1, 32), dtype=np.float32)
    x[0, 3] = amax
    act = quantize_activations(x)
    assert not act.values.any()
    assert act.scales.tolist() == [[0.0]]
    assert act.sums.tolist() == [[0.0]]


def test_activations_refuse_nan() -> None:
    with pytest.raises(NumericalError, match=r"\[project\] x"):
        quantize_activations(np.full((1, 32), np.nan, dtype=np.float32))


def test_activation_error_is_half_a_step() -> None:
    x = np.random.default_rng(0).standard_normal((5, 96), dtype=np.float32)
    act = quantize_activations(x)
    back = (act.values * act.scales[..., None]).reshape(5, 96)
    step = np.repeat(act.scales, 32, axis=1)
    assert (np.abs(back - x) <= 0.50001 * step).all()
