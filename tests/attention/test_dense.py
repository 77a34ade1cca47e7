"""The float64 oracle against hand values and a loop over single numbers."""

import math

import numpy as np
import pytest

from kvsieve.attention.dense import dense_attention
from kvsieve.errors import NumericalError, ShapeError

RNG_SHAPE = (6, 2, 5, 9, 4)  # Hq, Hkv, Tq, Tkv, D


def random_qkv(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    hq, hkv, tq, tkv, dim = RNG_SHAPE
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((hq, tq, dim)),
        rng.standard_normal((hkv, tkv, dim)),
        rng.standard_normal((hkv, tkv, dim)),
    )


def one_head(logits: list[float], values: list[float]) -> tuple[np.ndarray, ...]:
    """One query whose scaled logits and values are the given numbers."""
    q = np.ones((1, 1, 1))
    return q, np.array(logits)[None, :, None], np.array(values)[None, :, None]


def loop(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray, scale: float
) -> np.ndarray:
    """Softmax over the tokens that the mask lets through, one number at a time."""
    out = np.zeros(q.shape)
    for h in range(q.shape[0]):
        kv = h // (q.shape[0] // k.shape[0])
        for i in range(q.shape[1]):
            read = [t for t in range(k.shape[1]) if mask[i, t]]
            weight = {t: math.exp(scale * sum(q[h, i] * k[kv, t])) for t in read}
            total = sum(weight.values())
            for t in read:
                out[h, i] += weight[t] / total * v[kv, t]
    return out


class TestWorkedValues:
    """docs/selection.md, section 1: logits [0, ln 2, ln 3], values [2, 4, 8]."""

    LOGITS = (0.0, math.log(2), math.log(3))
    VALUES = (2.0, 4.0, 8.0)

    def test_full(self) -> None:
        q, k, v = one_head(list(self.LOGITS), list(self.VALUES))
        out, probs = dense_attention(q, k, v, np.ones((1, 3), dtype=bool), scale=1.0)
        assert out[0, 0, 0] == pytest.approx(17 / 3, abs=1e-14)
        assert probs[0, 0] == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=1e-15)

    def test_a_subset_is_renormalised(self) -> None:
        q, k, v = one_head(list(self.LOGITS), list(self.VALUES))
        out, probs = dense_attention(q, k, v, np.array([[True, False, True]]), scale=1.0)
        assert out[0, 0, 0] == pytest.approx(6.5, abs=1e-14)  # not 13 / 3, zeroed afterwards
        assert probs[0, 0] == pytest.approx([1 / 4, 0, 3 / 4], abs=1e-15)
        assert probs[0, 0, 1] == 0.0

    def test_a_leading_tile_without_a_visible_key(self) -> None:
        """ATT-01: two visible keys of logits 0 and ln 3, values 1 and 5."""
        q, k, v = one_head([900.0] * 32 + [0.0, math.log(3)], [7.0] * 32 + [1.0, 5.0])
        mask = np.arange(34)[None, :] >= 32
        assert dense_attention(q, k, v, mask, scale=1.0).out[0, 0, 0] == pytest.approx(4.0)


class TestAgainstALoop:
    def test_causal_by_default_and_grouped_heads(self) -> None:
        q, k, v = random_qkv()
        causal = np.tril(np.ones((5, 9), dtype=bool), k=4)
        expected = loop(q, k, v, mask=causal, scale=0.5)
        np.testing.assert_allclose(dense_attention(q, k, v).out, expected, atol=1e-13)

    @pytest.mark.parametrize("seed", range(3))
    def test_any_mask(self, seed: int) -> None:
        q, k, v = random_qkv(seed)
        mask = np.random.default_rng(seed).random((5, 9)) < 0.4
        mask[:, 3] = True
        expected = loop(q, k, v, mask=mask, scale=0.3)
        out, probs = dense_attention(q, k, v, mask, scale=0.3)
        np.testing.assert_allclose(out, expected, atol=1e-13)
        np.testing.assert_allclose(probs.sum(axis=-1), 1.0, atol=1e-14)
        assert not probs[:, ~mask].any()

    def test_a_mask_per_query_head_and_per_kv_head(self) -> None:
        q, k, v = random_qkv()
        per_kv = np.random.default_rng(5).random((2, 5, 9)) < 0.5
        per_kv[..., 0] = True
        by_kv = dense_attention(q, k, v, per_kv).out
        by_query = dense_attention(q, k, v, np.repeat(per_kv, 3, axis=0)).out
        np.testing.assert_array_equal(by_kv, by_query)
        np.testing.assert_allclose(
            by_kv[3:4], loop(q[3:4], k[1:], v[1:], mask=per_kv[1], scale=0.5)
        )


def test_queries_end_at_the_last_key() -> None:
    """ATT-07: 2 queries behind 2 keys, uniform logits, values 1 to 4."""
    q, k = np.zeros((1, 2, 4)), np.zeros((1, 4, 4))
    v = np.arange(1.0, 5.0)[None, :, None] * np.ones(4)
    assert dense_attention(q, k, v).out[0, :, 0] == pytest.approx([2.0, 2.5])


@pytest.mark.parametrize("heads", [(6, 2), (28, 4), (48, 2), (32, 8), (8, 8), (8, 1)])
def test_each_query_head_reads_its_own_group(heads: tuple[int, int]) -> None:
    """ATT-09: the values of KV head h are the constant h."""
    hq, hkv = heads
    v = np.arange(float(hkv))[:, None, None] * np.ones((1, 5, 2))
    out = dense_attention(np.ones((hq, 5, 2)), np.ones((hkv, 5, 2)), v).out
    assert out[:, 2, 0] == pytest.approx([h // (hq // hkv) for h in range(hq)])


def test_huge_logits_neither_overflow_nor_warn() -> None:
    q, k, v = one_head([1e6, 1e6, -1e6], [1.0, 3.0, 100.0])
    out = dense_attention(q, k, v, np.ones((1, 3), dtype=bool), scale=1.0).out
    assert out[0, 0, 0] == pytest.approx(2.0)


class TestErrors:
    def test_an_empty_row(self) -> None:
        q, k, v = random_qkv()
        mask = np.ones((5, 9), dtype=bool)
        mask[2] = False
        with pytest.raises(ShapeError, match=r"mask: expected every row .* query 2\)"):
            dense_attention(q, k, v, mask)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"q": np.zeros((5, 5, 4))}, "q: expected a multiple of num_kv_heads=2 .* got 5"),
            ({"q": np.zeros((6, 10, 4))}, "q: expected at most kv_len=9 queries"),
            ({"q": np.zeros((6, 5, 3))}, r"k: expected .*head_dim=3\], got \(2, 9, 4\)"),
            ({"q": np.zeros((6, 0, 4))}, "q: expected three non-empty dimensions"),
            ({"k": np.zeros((2, 9))}, "k: expected three non-empty dimensions"),
            ({"v": np.zeros((2, 8, 4))}, r"v: expected the shape of k, \(2, 9, 4\)"),
            ({"q": np.zeros((6, 5, 4), dtype=np.int32)}, "q: expected a float array, got int32"),
            ({"mask": np.ones((5, 8), dtype=bool)}, r"mask: expected bool \[Tq=5, Tkv=9\]"),
            ({"mask": np.ones((3, 5, 9), dtype=bool)}, "2 KV or 6 query heads"),
            ({"mask": np.ones((5, 9))}, "got float64"),
        ],
    )
    def test_shapes(self, change: dict[str, np.ndarray], message: str) -> None:
        q, k, v = random_qkv()
        with pytest.raises(ShapeError, match=message):
            dense_attention(**{"q": q, "k": k, "v": v, **change})

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_non_finite_input(self, bad: float) -> None:
        q, k, v = random_qkv()
        v[1, 2, 3] = bad
        with pytest.raises(NumericalError, match=r"\[dense_attention\] v: expected finite"):
            dense_attention(q, k, v)
