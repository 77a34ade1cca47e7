"""`attend` against the float64 oracle, and its promises that are exact to the bit."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.config import SparseAttention
from kvsieve.attention.dense import dense_attention
from kvsieve.attention.masks import sinks, sliding_window
from kvsieve.attention.selection import attend, select_blocks
from kvsieve.errors import ConfigError, NumericalError, ShapeError
from kvsieve.types import CacheType
from tests.attention.test_block_mask import block_masks

TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "q8_0": 4e-2, "q4_0": 4e-1}
"""Largest absolute error on normally distributed values, by cache type."""


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def qkv(hq: int, hkv: int, q_len: int, kv_len: int, dim: int) -> tuple[np.ndarray, ...]:
    return normal(0, hq, q_len, dim), normal(1, hkv, kv_len, dim), normal(2, hkv, kv_len, dim)


def random_mask(seed: int, *, q_len: int, kv_len: int, heads: int, lists: int = 1) -> BlockMask:
    """Random causal lists that keep the diagonal."""
    full = BlockMask.full(q_len=q_len, kv_len=kv_len, num_kv_heads=heads).to_blocks()
    some = np.random.default_rng(seed).random(full.shape) < 0.4
    own = np.arange(full.shape[2]) == np.arange(full.shape[1])[:, None] + (kv_len - q_len) // 32
    return BlockMask.from_blocks(
        full & (some | own), q_len=q_len, kv_len=kv_len, lists_per_kv_head=lists
    )


def values_of_scores(logits: list[float], values: list[float]) -> tuple[np.ndarray, ...]:
    """One decoded query whose logits (scale 1) and values are given."""
    q = np.zeros((1, 1, 16), dtype=np.float32)
    k, v = np.zeros((2, 1, len(logits), 16), dtype=np.float32)
    q[0, 0, 0] = 1.0
    k[0, :, 0], v[0, :, 0] = logits, values
    return q, k, v


class TestAgainstTheOracle:
    @pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0", "q4_0"])
    @pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 97), (70, 70), (60, 97), (33, 545)])
    def test_exact(self, backend: str, q_len: int, kv_len: int, cache_type: CacheType) -> None:
        q, k, v = qkv(4, 2, q_len, kv_len, 32)
        out = attend(q, k, v, cache_type=cache_type, backend=backend)
        assert (out.shape, out.dtype) == (q.shape, np.float32)
        expected = dense_attention(q, k, v).out
        np.testing.assert_allclose(out, expected, atol=TOLERANCE[cache_type])

    @pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0", "q4_0"])
    @pytest.mark.parametrize(("q_len", "kv_len"), [(1, 97), (130, 130), (60, 97), (1, 1300)])
    @pytest.mark.parametrize("lists", [1, 2])
    def test_sparse_is_dense_under_the_same_mask(
        self, *, backend: str, q_len: int, kv_len: int, cache_type: CacheType, lists: int
    ) -> None:
        q, k, v = qkv(4, 2, q_len, kv_len, 32)
        mask = random_mask(3, q_len=q_len, kv_len=kv_len, heads=2 * lists, lists=lists)
        out = attend(q, k, v, mask, cache_type=cache_type, backend=backend)
        expected = dense_attention(q, k, v, mask.to_dense()).out
        np.testing.assert_allclose(out, expected, atol=TOLERANCE[cache_type])

    @settings(max_examples=25, deadline=None)
    @given(block_masks(block=32), st.integers(1, 40))
    def test_any_mask_and_head_dim(self, mask: BlockMask, dim: int) -> None:
        q, k, v = qkv(2 * mask.num_kv_heads, mask.num_kv_heads, mask.q_len, mask.kv_len, dim)
        out = attend(q, k, v, mask, backend="reference")
        np.testing.assert_allclose(out, dense_attention(q, k, v, mask.to_dense()).out, atol=2e-6)

    @pytest.mark.parametrize("dim", [1, 16, 24, 33, 128])
    def test_head_dims(self, backend: str, dim: int) -> None:
        q, k, v = qkv(2, 1, 5, 50, dim)
        np.testing.assert_allclose(
            attend(q, k, v, backend=backend), dense_attention(q, k, v).out, atol=2e-6
        )

    @pytest.mark.parametrize("selector", ["probe", "even"])
    @pytest.mark.parametrize("share", ["head", "group"])
    def test_selected_blocks(self, backend: str, selector: str, share: str) -> None:
        q, k, v = qkv(6, 2, 192, 192, 16)
        sparse = SparseAttention(k=3, selector=selector, share=share, dense_tail=40)  # type: ignore[arg-type]
        for rows in (q, q[:, -1:]):
            mask = select_blocks(rows, k, sparse=sparse)
            assert mask.density < 1
            expected = dense_attention(rows, k, v, mask.to_dense()).out
            np.testing.assert_allclose(
                attend(rows, k, v, mask, backend=backend), expected, atol=2e-6
            )


class TestWorkedValues:
    def test_weights_sum_to_one_over_the_set(self, backend: str) -> None:
        """Section 1: keeping logits 0 and ln 3 of [0, ln 2, ln 3] gives 6.5, not 4.333."""
        low = [-60.0] * 31
        q, k, v = values_of_scores(
            [0.0, *low, math.log(2), *low, math.log(3)], [2.0] * 32 + [4.0] * 32 + [8.0]
        )
        full = attend(q, k, v, scale=1.0, backend=backend)
        kept = BlockMask.from_lists([[[0, 2]]], q_len=1, kv_len=65)
        some = attend(q, k, v, kept, scale=1.0, backend=backend)
        assert full[0, 0, 0] == pytest.approx(17 / 3, abs=1e-5)
        assert some[0, 0, 0] == pytest.approx(6.5, abs=1e-5)

    def test_a_leading_tile_without_a_visible_key(self) -> None:
        """ATT-01 as a token mask: the first 32 tokens are not read at all."""
        q, k, v = values_of_scores([50.0] * 32 + [0.0, math.log(3)], [9.0] * 32 + [1.0, 5.0])
        mask = np.arange(34)[None, :] >= 32
        for order in (slice(None), slice(None, None, -1)):
            out = attend(q, k[:, order], v[:, order], mask[:, order], scale=1.0)
            assert out[0, 0, 0] == pytest.approx(4.0, abs=1e-6)

    @pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0", "q4_0"])
    @pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 95, 97])
    def test_a_partial_last_block(self, backend: str, length: int, cache_type: CacheType) -> None:
        """ATT-03: every logit -10 and every value 1. Zero-filled rows would take all the weight."""
        q, k, v = values_of_scores([-10.0] * length, [1.0] * length)
        out = attend(q, k, v, scale=1.0, cache_type=cache_type, backend=backend)
        assert out[0, 0, 0] == pytest.approx(1.0, abs=1e-3)
        rows = np.repeat(q, length, axis=1)
        out = attend(rows, k, v, scale=1.0, cache_type=cache_type, backend=backend)
        assert out[0, :, 0] == pytest.approx(1.0, abs=1e-3)

    def test_queries_end_at_the_last_key(self, backend: str) -> None:
        """ATT-07: 2 queries behind 2 cached keys, uniform logits, values 1 to 4."""
        _, k, v = values_of_scores([0.0] * 4, [1.0, 2.0, 3.0, 4.0])
        out = attend(np.zeros((1, 2, 16), dtype=np.float32), k, v, backend=backend)
        assert out[0, :, 0] == pytest.approx([2.0, 2.5])

    @pytest.mark.parametrize("heads", [(6, 2), (28, 4), (48, 2), (32, 8), (8, 8), (8, 1)])
    @pytest.mark.parametrize("q_len", [1, 40])
    def test_each_query_head_reads_its_own_group(
        self, backend: str, heads: tuple[int, int], q_len: int
    ) -> None:
        """ATT-09, with lists that differ per KV head: head h reads block h % 2 and the last."""
        hq, hkv = heads
        k = np.zeros((hkv, 104, 16), dtype=np.float32)
        v = np.zeros((hkv, 104, 16), dtype=np.float32)
        v += np.arange(hkv, dtype=np.float32)[:, None, None]
        v[:, :32, 1], v[:, 32:64, 1] = 100.0, 200.0
        tiles = range((104 - q_len) // 32, 4)
        lists = [[[h % 2] for _ in tiles] for h in range(hkv)]
        mask = BlockMask.from_lists(lists, q_len=q_len, kv_len=104)
        q = np.zeros((hq, q_len, 16), dtype=np.float32)
        out = attend(q, k, v, mask, backend=backend)
        expected = [h // (hq // hkv) for h in range(hq)]
        assert out[:, -1, 0] == pytest.approx(expected)
        assert out[:, -1, 1] == pytest.approx([100.0 * (1 + kv % 2) for kv in expected])


class TestBits:
    """Promises that hold exactly, not within a tolerance."""

    @pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
    @pytest.mark.parametrize(("q_len", "kv_len"), [(1, 97), (130, 130), (1, 640)])
    def test_a_full_mask_is_exact(
        self, backend: str, q_len: int, kv_len: int, cache_type: CacheType
    ) -> None:
        q, k, v = qkv(4, 2, q_len, kv_len, 32)
        full = BlockMask.full(q_len=q_len, kv_len=kv_len, num_kv_heads=2)
        options: dict[str, Any] = {"cache_type": cache_type, "backend": backend}
        np.testing.assert_array_equal(attend(q, k, v, full, **options), attend(q, k, v, **options))

    @pytest.mark.parametrize(
        ("n", "k"), [(97, 4), *((n, 2) for n in (1, 10, 31, 32, 33, 50, 64)), (200, 7), (97, 99)]
    )
    def test_a_budget_that_fits_everything_changes_nothing(
        self, backend: str, n: int, k: int
    ) -> None:
        """ATT-06, decode and prefill."""
        q, keys, v = qkv(4, 2, n, n, 16)
        for rows in (q, q[:, -1:]):
            mask = select_blocks(rows, keys, sparse=SparseAttention(k=k, dense_tail=0))
            np.testing.assert_array_equal(
                attend(rows, keys, v, mask, backend=backend),
                attend(rows, keys, v, backend=backend),
            )

    @pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_later_tokens_change_no_earlier_output(
        self, backend: str, cache_type: CacheType, masked: bool
    ) -> None:
        """Exact and under a fixed mask: any later token, also one inside the same tile."""
        q, k, v = qkv(2, 1, 100, 100, 16)
        mask = random_mask(1, q_len=100, kv_len=100, heads=1) if masked else None
        options: dict[str, Any] = {"cache_type": cache_type, "backend": backend}
        before = attend(q, k, v, mask, **options)
        for t in (1, 31, 32, 40, 64, 77, 99):
            changed = [array.copy() for array in (q, k, v)]
            for array in changed:
                array[:, t:] = 30 * normal(t, *array[:, t:].shape)
            after = attend(*changed, mask, **options)
            np.testing.assert_array_equal(after[:, :t], before[:, :t])
            assert (after[:, t:] != before[:, t:]).any()

    def test_later_tiles_change_no_earlier_output_in_sparse_prefill(self, backend: str) -> None:
        q, k, v = qkv(2, 1, 256, 256, 16)
        sparse = SparseAttention(k=3, dense_tail=32)
        before = attend(q, k, v, select_blocks(q, k, sparse=sparse), backend=backend)
        for t in range(32, 256, 32):
            changed = [array.copy() for array in (q, k, v)]
            for array in changed:
                array[:, t:] = 30 * normal(t, *array[:, t:].shape)
            mask = select_blocks(changed[0], changed[1], sparse=sparse)
            after = attend(*changed, mask, backend=backend)
            np.testing.assert_array_equal(after[:, :t], before[:, :t])

    @pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
    def test_a_row_does_not_depend_on_its_neighbours(
        self, backend: str, cache_type: CacheType
    ) -> None:
        """ATT-07: any chunking, also a start that is not a multiple of 32; and one row alone."""
        q, k, v = qkv(4, 2, 130, 130, 32)
        options: dict[str, Any] = {"cache_type": cache_type, "backend": backend}
        whole = attend(q, k, v, **options)
        for chunk in (1, 31, 32, 33, 37, 64):
            pieces = [
                attend(q[:, at : at + chunk], k[:, : at + chunk], v[:, : at + chunk], **options)
                for at in range(0, 130, chunk)
                if chunk > 1 or at % 29 == 0
            ]
            rows = whole if chunk > 1 else whole[:, ::29]
            np.testing.assert_array_equal(np.concatenate(pieces, axis=1), rows)

    def test_what_lies_behind_the_arrays_is_not_read(self, backend: str) -> None:
        wide = np.full((3, 2, 120, 20), np.nan, dtype=np.float32)
        views = [array[:, 8:105, 2:18] for array in wide]
        for seed, view in enumerate(views):
            view[:] = normal(seed, 2, 97, 16)
        copies = [view.copy() for view in views]
        np.testing.assert_array_equal(
            attend(*views, backend=backend), attend(*copies, backend=backend)
        )


class TestTokenMasks:
    def test_the_exact_rule_on_tokens(self) -> None:
        q, k, v = qkv(4, 2, 80, 80, 16)
        tokens = (sinks(3) | sliding_window(7)).tokens(80)
        out = attend(q, k, v, tokens)
        np.testing.assert_allclose(out, dense_attention(q, k, v, tokens).out, atol=1e-6)
        assert out.dtype == np.float32
        by_blocks = attend(q, k, v, (sinks(3) | sliding_window(7)).blocks(80, num_kv_heads=2),
                           backend="reference")  # fmt: skip
        assert np.abs(by_blocks - out).max() > 0.1  # whole blocks are another set of tokens

    def test_a_block_mask_of_another_size(self) -> None:
        q, k, v = qkv(2, 2, 20, 20, 16)
        mask = sliding_window(5).blocks(20, num_kv_heads=2, block_size=4)
        np.testing.assert_allclose(
            attend(q, k, v, mask), dense_attention(q, k, v, mask.to_dense()).out, atol=1e-6
        )

    def test_an_empty_row(self) -> None:
        q, k, v = qkv(1, 1, 2, 2, 16)
        with pytest.raises(ShapeError, match="an empty row"):
            attend(q, k, v, np.eye(2, dtype=bool) & (np.arange(2) < 1))

    def test_no_quantised_cache(self) -> None:
        q, k, v = qkv(1, 1, 2, 2, 16)
        with pytest.raises(ConfigError, match="cache_type: expected f32 with a token mask"):
            attend(q, k, v, np.tril(np.ones((2, 2), dtype=bool)), cache_type="q8_0")


class TestErrors:
    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            (BlockMask.full(q_len=1, kv_len=97), r"= \(2, 1, 97\) .* got \(1, 1, 97\)"),
            (BlockMask.full(q_len=1, kv_len=96, num_kv_heads=2), r"got \(2, 1, 96\)"),
            (BlockMask.from_lists([[[3]]] * 6, q_len=1, kv_len=97, lists_per_kv_head=3), "with 3"),
            (np.ones((2, 97), dtype=bool), r"mask: expected bool \[Tq=1, Tkv=97\]"),
        ],
    )  # fmt: skip
    def test_masks_of_other_sizes(self, mask: Any, message: str) -> None:
        q, k, v = qkv(4, 2, 1, 97, 16)
        with pytest.raises(ShapeError, match=message):
            attend(q, k, v, mask, backend="reference")

    def test_arrays(self) -> None:
        q, k, v = qkv(4, 2, 1, 97, 16)
        with pytest.raises(ShapeError, match=r"\[attend\] k: expected .*head_dim=16\]"):
            attend(q, k[..., :8], v)
        with pytest.raises(ShapeError, match=r"\[attend\] v: expected the shape of k"):
            attend(q, k, v[:, :96])
        with pytest.raises(ShapeError, match=r"\[attend\] q: expected a float array"):
            attend(q.astype(np.int8), k, v)
        k[1, 96, 15] = np.inf
        with pytest.raises(NumericalError, match=r"\[attend\] k: expected finite"):
            attend(q, k, v)
        with pytest.raises(NumericalError, match=r"\[attend\] v: expected finite float32"):
            attend(q, v, np.full(v.shape, 1e300))

    def test_options(self) -> None:
        q, k, v = qkv(4, 2, 1, 97, 16)
        unknown = "backend: expected one of native, reference, got 'cuda'"
        with pytest.raises(ConfigError, match=unknown):
            attend(q, k, v, backend="cuda")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=unknown):
            attend(q, k, v, np.ones((1, 97), dtype=bool), backend="cuda")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="k_type: expected one of f32"):
            attend(q, k, v, cache_type="q2", backend="reference")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="scale: expected a finite number"):
            attend(q, k, v, scale=float("nan"))
