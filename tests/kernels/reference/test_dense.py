"""Projections and row operations: hand values, the gguf package, float64."""

import gguf
import numpy as np
import pytest

from kvsieve.errors import ConfigError, ModelFileError, NumericalError, ShapeError
from kvsieve.kernels.backend import WeightSource
from kvsieve.kernels.reference import ReferenceBackend
from kvsieve.kernels.reference.dense import unpack_weight

BACKEND = ReferenceBackend()
GGUF_TYPES = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def matrix(rows=24, cols=96, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def source(format_, values):
    rows, cols = values.shape
    data = values
    if format_ != "f32":
        data = gguf.quantize(values, GGUF_TYPES[format_])
    return WeightSource(data=data, format=format_, rows=rows, cols=cols)


@pytest.mark.parametrize("format_", GGUF_TYPES)
@pytest.mark.parametrize("kind", [None, "f32"])
def test_gguf_blocks_mean_what_the_gguf_package_says(format_, kind) -> None:
    src = source(format_, matrix())
    weight = BACKEND.pack_weight(src, kind=kind)
    assert weight.kind == (kind or {"q8_0": "q8"}.get(format_, "q4"))
    want = gguf.dequantize(src.data, GGUF_TYPES[format_])
    np.testing.assert_allclose(unpack_weight(weight), want, rtol=1e-6, atol=1e-7)


def test_f32_to_8_bits_by_hand() -> None:
    values = np.zeros((1, 64), dtype=np.float32)
    values[0, :4] = [127, -3.5, 2.5, 0.4]  # d = 1, half to even
    weight = BACKEND.pack_weight(source("f32", values))
    assert weight.kind == "q8"
    assert unpack_weight(weight)[0, :4].tolist() == [127, -4, 2, 0]
    assert not unpack_weight(weight)[0, 4:].any()


def test_f32_to_8_bits_error_bound() -> None:
    values = matrix()
    got = unpack_weight(BACKEND.pack_weight(source("f32", values)))
    step = np.abs(values.reshape(24, 3, 32)).max(axis=2) / 127
    assert (np.abs(got - values) <= 0.505 * np.repeat(step, 32, axis=1) * (1 + 2**-10)).all()


def test_f32_to_4_bits_by_hand() -> None:
    values = np.zeros((1, 64), dtype=np.float32)
    values[0, :6] = [16, -16, 3, -3, 1.5, 15.9]  # 16 comes first: d = -2; half to even
    weight = BACKEND.pack_weight(source("f32", values), kind="q4")
    assert weight.kind == "q4"
    assert unpack_weight(weight)[0, :6].tolist() == [16, -14, 4, -4, 2, 16]
    assert not unpack_weight(weight)[0, 6:].any()


def test_f32_to_4_bits_equals_q4_0_of_the_gguf_package() -> None:
    """Theirs rounds after dividing by a scale that is not rounded yet, so a few codes differ."""
    values = matrix(64, 256)
    got = unpack_weight(BACKEND.pack_weight(source("f32", values), kind="q4"))
    want = gguf.dequantize(gguf.quantize(values, GGUF_TYPES["q4_0"]), GGUF_TYPES["q4_0"])
    assert np.isclose(got, want, rtol=1e-3).mean() > 0.99
    step = np.abs(values.reshape(64, 8, 32)).max(axis=2) / 8
    assert (np.abs(got - want) <= 1.01 * np.repeat(step, 32, axis=1)).all()


def test_subnormal_scale_is_zero_weights_not_nan() -> None:
    values = np.full((1, 32), 1e-9, dtype=np.float32)
    assert not unpack_weight(BACKEND.pack_weight(source("f32", values))).any()


@pytest.mark.parametrize("format_", ["f32", *GGUF_TYPES])
@pytest.mark.parametrize("kind", [None, "f32"])
def test_project_against_float64(format_, kind) -> None:
    weight = BACKEND.pack_weight(source(format_, matrix()), kind=kind)
    x = matrix(5, 96, seed=1)
    want = x.astype(np.float64) @ unpack_weight(weight).astype(np.float64).T
    tolerance = 1e-5 if weight.kind == "f32" else 0.15  # 96 products, 8-bit activations
    np.testing.assert_allclose(BACKEND.project(x, weight), want, atol=tolerance)


@pytest.mark.parametrize("format_", GGUF_TYPES)
def test_project_of_integers_is_exact(format_) -> None:
    """Activations that are multiples of their scale leave only float rounding."""
    weight = BACKEND.pack_weight(source(format_, matrix()))
    x = np.random.default_rng(2).integers(-127, 128, (4, 96)).astype(np.float32)
    x[:, ::32] = 127
    want = x.astype(np.float64) @ unpack_weight(weight).astype(np.float64).T
    np.testing.assert_allclose(BACKEND.project(x, weight), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("format_", ["f32", *GGUF_TYPES])
@pytest.mark.parametrize("kind", [None, "f32"])
def test_a_row_does_not_depend_on_its_neighbours(format_, kind) -> None:
    weight = BACKEND.pack_weight(source(format_, matrix()), kind=kind)
    x = matrix(7, 96, seed=3)
    whole = BACKEND.project(x, weight)
    for row in range(7):
        assert np.array_equal(BACKEND.project(x[row : row + 1], weight)[0], whole[row])


def test_pack_errors() -> None:
    good = matrix()
    with pytest.raises(ConfigError, match=r"kind: expected f32 or q8 for a q8_0 matrix, got 'q4'"):
        BACKEND.pack_weight(source("q8_0", good), kind="q4")
    with pytest.raises(ShapeError, match=r"cols a multiple of 32, got 24, 95"):
        BACKEND.pack_weight(WeightSource(data=good[:, :95], format="f32", rows=24, cols=95))
    with pytest.raises(ShapeError, match=r"data: expected uint8 \(24, 54\)"):
        BACKEND.pack_weight(WeightSource(data=good, format="q4_0", rows=24, cols=96))
    bad = good.copy()
    bad[3, 4] = np.nan
    for kind in ("q8", "f32"):
        with pytest.raises(ModelFileError, match="finite"):
            BACKEND.pack_weight(source("f32", bad), kind=kind)
    bad[3, 4] = 1e8
    with pytest.raises(ModelFileError, match="float16 scales"):
        BACKEND.pack_weight(source("f32", bad))
    blocks = source("q8_0", good)
    blocks.data[2, :2] = [0x00, 0x7C]  # an infinite scale
    with pytest.raises(ModelFileError, match="scales: expected finite"):
        BACKEND.pack_weight(blocks)


def test_project_errors() -> None:
    weight = BACKEND.pack_weight(source("q8_0", matrix()))
    with pytest.raises(
        ShapeError, match=r"\[project\] x: expected C-contiguous float32 \(\*, 96\)"
    ):
        BACKEND.project(matrix(2, 64), weight)
    x = matrix(2, 96)
    x[1, 1] = np.inf
    with pytest.raises(NumericalError, match=r"\[project\] x"):
        BACKEND.project(x, weight)


def test_gelu_by_hand() -> None:
    """gelu(1) = 0.8412, gelu(-1) = -0.1588, gelu(3) = 2.9964 in the tanh form."""
    gate = np.array([[0, 1, -1, 3, -30, 30, 1e30, -1e30]], dtype=np.float32)
    got = BACKEND.gelu_mul(gate, np.full_like(gate, 2))
    want = [[0, 1.6823840, -0.3176160, 5.9927254, 0, 60, 2e30, 0]]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


def test_rms_norm() -> None:
    x = np.array([[3, 4], [0, 0]], dtype=np.float32)
    weight = np.array([2, 1], dtype=np.float32)
    got = BACKEND.rms_norm(x, weight, eps=1e-5)
    root = np.sqrt(12.5 + 1e-5)
    np.testing.assert_allclose(got, [[6 / root, 4 / root], [0, 0]], rtol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs_by_their_angle(interleaved) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2, 10), dtype=np.float32)
    angles = rng.uniform(-4, 4, (3, 4))  # 8 of 10 channels
    got = BACKEND.rope(
        x,
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        interleaved=interleaved,
    )
    for i in range(4):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
        turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles[:, None, i])
        np.testing.assert_allclose(got[..., first], turned.real, atol=1e-6)
        np.testing.assert_allclose(got[..., second], turned.imag, atol=1e-6)
    assert np.array_equal(got[..., 8:], x[..., 8:])


def test_rope_checks_its_pairs() -> None:
    angles = np.zeros((1, 3), dtype=np.float32)
    with pytest.raises(ShapeError, match="up to 2 pairs, got 3"):
        BACKEND.rope(np.zeros((1, 1, 4), np.float32), angles, angles, interleaved=True)


def test_silu_mul() -> None:
    gate = np.array([[0, 1, -2, 100, -100, -1e30]], dtype=np.float32)
    up = np.array([[5, 2, 3, 1, 1, 1]], dtype=np.float32)
    want = [[0, 2 / (1 + np.exp(-1.0)), -6 / (1 + np.exp(2.0)), 100, 0, 0]]
    np.testing.assert_allclose(BACKEND.silu_mul(gate, up), want, rtol=1e-6, atol=1e-30)
