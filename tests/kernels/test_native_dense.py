"""Native == reference for projections and row operations, on every instruction set."""

import numpy as np
import pytest

from kvsieve.errors import ConfigError, ModelFileError, NumericalError, ShapeError
from kvsieve.kernels.backend import WeightSource
from tests.kernels.parity import REFERENCE, close, quantised, source


@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (40, 96), (1, 32), (33, 160)])
@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q8_0", "f32->q8", "f32->q4", "f32->f32"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 13])
def test_project(native, shape, fmt, tokens):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((tokens, shape[1]), dtype=np.float32)
    if fmt.startswith("f32"):
        matrix, kind = source(rng.standard_normal(shape, dtype=np.float32)), fmt[5:]
    else:
        matrix, kind = quantised(fmt, *shape), None
    got = native.project(x, native.pack_weight(matrix, kind=kind))
    close(got, REFERENCE.project(x, REFERENCE.pack_weight(matrix, kind=kind)), 2e-6)


@pytest.mark.parametrize("fmt", ["q4_1", "q8_0"])
def test_a_row_is_projected_to_the_same_bits_alone_and_among_others(native, fmt):
    x = np.random.default_rng(2).standard_normal((70, 96), dtype=np.float32)
    weight = native.pack_weight(quantised(fmt, 40, 96))
    together = native.project(x, weight)
    alone = np.concatenate([native.project(x[i : i + 1], weight) for i in range(len(x))])
    assert np.array_equal(together, alone)


def test_project_of_zero_and_tiny_rows_is_finite(native):
    x = np.zeros((3, 32), np.float32)
    x[1] = 1e-40
    x[2, 0] = 1e30
    weight = quantised("q4_1", 16, 32)
    got = native.project(x, native.pack_weight(weight))
    assert np.all(np.isfinite(got))
    assert not got[0].any()
    close(got[2:], REFERENCE.project(x[2:], REFERENCE.pack_weight(weight)), 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 15, 16, 63])
def test_project_refuses_what_is_not_finite(native, bad, column):
    x = np.ones((3, 64), np.float32)
    x[1, column] = bad
    with pytest.raises(NumericalError, match="x: expected finite"):
        native.project(x, native.pack_weight(quantised("q4_1", 16, 64)))


@pytest.mark.parametrize("width", [16, 64, 576])
def test_rms_norm_and_gates(native, width):
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((2, 5, width), dtype=np.float32) * 3
    w = rng.uniform(0.5, 2, width).astype(np.float32)
    close(native.rms_norm(x, w, eps=1e-5), REFERENCE.rms_norm(x, w, eps=1e-5), 1e-6)
    close(native.silu_mul(x, y), REFERENCE.silu_mul(x, y), 1e-6)
    close(native.gelu_mul(x, y), REFERENCE.gelu_mul(x, y), 1e-6)


@pytest.mark.parametrize("function", ["silu_mul", "gelu_mul"])
def test_extreme_gates(native, function):
    gate = np.array([-1e30, -1e4, -100, -88, 0, 88, 1e4, 1e30] * 2, np.float32)
    got = getattr(native, function)(gate, np.ones_like(gate))
    assert np.all(np.isfinite(got))
    # e**88 is where the exponential ends, so the largest negative gates leave 1e30 * e**-88.
    np.testing.assert_allclose(got, np.where(gate > 0, gate, 0), atol=1e-8)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [16, 8])  # 8: only a part of the head rotates
def test_rope(native, interleaved, pairs):
    rng = np.random.default_rng(4)
    x = rng.standard_normal((6, 3, 32), dtype=np.float32)
    angle = rng.uniform(0, 6, (6, pairs))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    got = native.rope(x, cos, sin, interleaved=interleaved)
    close(got, REFERENCE.rope(x, cos, sin, interleaved=interleaved), 1e-6)


@pytest.mark.parametrize(("kind", "largest"), [("q8", 8.3e6), ("q4", 5.2e5)])
def test_weights_too_large_for_their_scales_are_refused(native, kind, largest):
    matrix = np.full((16, 32), largest, np.float32)
    native.pack_weight(source(matrix), kind=kind)
    with pytest.raises(ModelFileError, match="magnitudes"):
        native.pack_weight(source(matrix * 1.01), kind=kind)


class Slices:
    """A `RowSource` that counts the most rows it was asked for at once."""

    def __init__(self, matrix):
        self.matrix, self.shape, self.dtype = matrix, matrix.shape, matrix.dtype
        self.most = 0

    def __getitem__(self, rows):
        part = self.matrix[rows]
        self.most = max(self.most, len(part))
        return part


@pytest.mark.parametrize("kind", ["q4", "q8", "f32"])
def test_a_matrix_that_comes_in_slices_is_packed_like_one_that_comes_whole(native, kind):
    rng = np.random.default_rng(8)
    matrix = rng.standard_normal((100, 1 << 16), np.float32)  # 2**21 values are 32 rows
    x = rng.standard_normal((2, matrix.shape[1]), np.float32)
    slices = Slices(matrix)
    got = native.project(x, native.pack_weight(source(slices), kind=kind))
    assert np.array_equal(got, native.project(x, native.pack_weight(source(matrix), kind=kind)))
    assert slices.most == 32


def test_weight_data_that_does_not_hold_its_shape_is_refused(native):
    wrong = WeightSource(data=np.zeros((16, 17), np.uint8), format="q4_0", rows=16, cols=32)
    with pytest.raises(ShapeError, match=r"expected uint8 \(16, 18\)"):
        native.pack_weight(wrong)
    with pytest.raises(ConfigError, match="kind: expected q4"):
        native.pack_weight(quantised("q4_0", 16, 32), kind="q8")
