"""Logits of every cache type: hand values and the float64 product of what the cache holds."""

import numpy as np
import pytest

from kvsieve.kernels.reference.logits import fold_queries, logits
from kvsieve.kernels.reference.quantize import quantize_q4, quantize_q8, quantize_rows


def test_q8_by_hand() -> None:
    q = np.zeros((1, 32), dtype=np.float32)
    q[0, :2] = [254, 2]  # folded with 0.5: 127 and 1, scale 1
    k = np.zeros((1, 32), dtype=np.float32)
    k[0, :2] = [-254, 4]  # scale 2: -127 and 2
    folded = fold_queries(q, "q8_0", scale=0.5)
    assert folded.values[0, :2].tolist() == [127, 1]
    assert logits(folded, quantize_q8(k)).tolist() == [[(127 * -127 + 1 * 2) * 2.0]]


def test_q4_adds_groups_with_their_own_scales() -> None:
    q = np.zeros((1, 64), dtype=np.float32)
    q[0, [0, 32]] = [127, 2]
    k = np.zeros((1, 64), dtype=np.float32)
    k[0, [0, 32, 33]] = [3, 8, 16]  # groups' scales -0.375 and -2: codes -8, then -4 and -8
    folded = fold_queries(q, "q4_0", scale=1.0)
    assert logits(folded, quantize_q4(k)).tolist() == [[127 * 3.0 + 2 * 8.0]]


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0", "q4_0"])
def test_against_float64(cache_type) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 9, 64)).astype(np.float32)
    keys = quantize_rows(k, cache_type, function="append", name="k")
    folded = fold_queries(q, cache_type, scale=0.125)

    def exact(rows):
        values = rows.values.astype(np.float64)
        if rows.scales is None:
            return values
        return values * np.repeat(rows.scales, 64 // rows.scales.shape[1], axis=1)

    got = logits(folded, keys)
    np.testing.assert_allclose(got, exact(folded) @ exact(keys).T, rtol=1e-5, atol=1e-5)
    alone = logits(folded.take(slice(3, 4)), keys.take(slice(5, 7)))
    assert np.array_equal(alone[0], got[3, 5:7])
