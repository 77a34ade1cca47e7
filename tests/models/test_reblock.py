"""Blocks in another type against the `gguf` package's reading of both, and by hand."""

import gguf
import numpy as np
import pytest

from kvsieve.errors import ModelFileError
from kvsieve.models.reblock import q4_k_as_q4_1, q5_0_as_q8_0
from tests.tiny_model import encode_weight

Q4_K, Q4_1, Q5_0, Q8_0 = (
    gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q4_1", "Q5_0", "Q8_0")
)
CODES = np.random.default_rng(5).integers(0, 256, (7, 2, 256), dtype=np.uint8)
"""Any bits will do for what is no float."""


def half(value: float) -> np.ndarray:
    return np.array([value], "<f2").view(np.uint8)


def test_q5_0_keeps_every_value() -> None:
    blocks = CODES[:, :, :22].copy()
    blocks[:, :, :2] = half(-0.37)
    raw = blocks.reshape(7, 44)
    want = gguf.dequantize(raw, Q5_0)
    assert len(np.unique(want)) == 32  # all codes occur
    np.testing.assert_array_equal(gguf.dequantize(q5_0_as_q8_0(raw), Q8_0), want)


def test_q5_0_by_hand() -> None:
    # The fifth bit is set for values 1 and 31; the others are 3 in low nibbles, 9 in high ones.
    fifth = np.array([1 << 1 | 1 << 31], "<u4").view(np.uint8)
    raw = np.concatenate([half(2.0), fifth, np.full(16, 0x93, np.uint8)])[None]
    codes = q5_0_as_q8_0(raw)[0, 2:].view(np.int8)
    want = [3 - 16] * 16 + [9 - 16] * 16
    want[1], want[31] = 3, 9
    assert codes.tolist() == want


def test_q4_k_keeps_codes_and_rounds_scales_and_minima_once() -> None:
    blocks = CODES[:, :, :144].copy()
    blocks[:, :, :2] = half(0.0123)
    blocks[:, :, 2:4] = half(0.0456)
    raw = blocks.reshape(7, 288)
    want, got = gguf.dequantize(raw, Q4_K), gguf.dequantize(q4_k_as_q4_1(raw), Q4_1)
    # Largest products: 63 of each, times 15 for a code. f16 has 11 bits, half the last is lost.
    d, m = np.float16(0.0123), np.float16(0.0456)
    assert np.abs(got - want).max() <= (63 * d * 15 + 63 * m) * 2.0**-11
    assert np.abs(want).max() > 63 * d * 10
    assert np.abs(got - want).max() > 0


def test_q4_k_by_hand() -> None:
    # Scale of group g is 10 + g, with 48 more from group 4 on; its minimum is g, 32 more likewise.
    scales = [10, 11, 12, 13, 62, 63, 48, 49]
    minima = [0, 1, 2, 3, 36, 37, 38, 39]
    packed = np.zeros(12, np.uint8)
    for g in range(4):
        packed[g] = scales[g] | (scales[g + 4] >> 4) << 6
        packed[4 + g] = minima[g] | (minima[g + 4] >> 4) << 6
        packed[8 + g] = (scales[g + 4] & 15) | (minima[g + 4] & 15) << 4
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32) * 7 % 16
    pairs = np.concatenate([codes[2 * i] | codes[2 * i + 1] << 4 for i in range(4)])
    raw = np.concatenate([half(0.5), half(0.25), packed, pairs])[None]
    got = q4_k_as_q4_1(raw).reshape(8, 20)
    for g in range(8):
        d, m = got[g, :4].copy().view("<f2")
        assert (d, m) == (0.5 * scales[g], -0.25 * minima[g])
        unpacked = np.concatenate([got[g, 4:] & 15, got[g, 4:] >> 4])
        np.testing.assert_array_equal(unpacked, codes[g])


def test_q4_k_is_nearer_than_8_bits_would_be() -> None:
    values = np.random.default_rng(1).standard_normal((64, 512), dtype=np.float32)
    raw = encode_weight(values, "Q4_K", seed=3)
    want = gguf.dequantize(raw, Q4_K)
    kept = gguf.dequantize(q4_k_as_q4_1(raw), Q4_1) - want
    rounded = gguf.dequantize(gguf.quantize(want, Q8_0), Q8_0) - want
    assert np.abs(kept).mean() < np.abs(rounded).mean() / 4


def test_products_beyond_float16_are_refused() -> None:
    raw = np.zeros((1, 144), np.uint8)
    raw[0, :2] = half(60000)
    assert np.isfinite(gguf.dequantize(q4_k_as_q4_1(raw), Q4_1)).all()
    raw[0, 4] = 2
    with pytest.raises(ModelFileError, match="Q4_K: expected scales and minima up to 65504, got 1"):
        q4_k_as_q4_1(raw)
