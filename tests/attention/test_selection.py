"""`select_blocks` against the rules read aloud (`naive.py`); the gate; what is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.config import SparseAttention
from kvsieve.attention.selection import select_blocks
from kvsieve.errors import ConfigError, NumericalError, ShapeError
from tests.attention import naive
from tests.attention.plain import decoded, integers, lists_of, spikes


class TestAgainstTheNaiveRules:
    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        n=st.integers(1, 400),
        k=st.integers(1, 9),
        heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
        selector=st.sampled_from(["probe", "even"]),
        share=st.sampled_from(["head", "group"]),
        shape=st.sampled_from([(32, 8), (32, 3), (32, 32), (64, 8), (96, 5)]),
        with_importance=st.booleans(),
    )
    def test_decode(
        self, *, seed: int, n: int, k: int, heads: tuple[int, int], selector: str, share: str,
        shape: tuple[int, int], with_importance: bool,
    ) -> None:  # fmt: skip
        block, num_probes = shape
        q, keys = integers(seed, heads[0], 1, 3), integers(seed + 1, heads[1], n, 3)
        importance = np.random.default_rng(seed).integers(0, 3, n) if with_importance else None
        mask = select_blocks(
            q,
            keys,
            sparse=SparseAttention(
                k=k, block_size=block, num_probes=num_probes, selector=selector, share=share  # type: ignore[arg-type]
            ),
            importance=importance,
            scale=0.5,
        )  # fmt: skip
        assert lists_of(mask) == naive.decode(
            q[:, 0], keys, k=k, selector=selector, share=share, scale=0.5, block=block,
            num_probes=num_probes, importance=importance,
        )  # fmt: skip

    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        n=st.integers(2, 330),
        first_tile=st.integers(0, 5),
        k=st.integers(1, 7),
        heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
        selector=st.sampled_from(["probe", "even"]),
        shape=st.sampled_from([(32, 8), (32, 3), (64, 8)]),
        dense_tail=st.sampled_from([0, 31, 64, 1000]),
    )
    def test_prefill(
        self, *, seed: int, n: int, first_tile: int, k: int, heads: tuple[int, int],
        selector: str, shape: tuple[int, int], dense_tail: int,
    ) -> None:  # fmt: skip
        start = min(first_tile, (n - 1) // 32) * 32
        q, keys = integers(seed, heads[0], n - start, 3), integers(seed + 1, heads[1], n, 3)
        sparse = SparseAttention(
            k=k, block_size=shape[0], num_probes=shape[1], selector=selector, dense_tail=dense_tail  # type: ignore[arg-type]
        )  # fmt: skip
        mask = select_blocks(q, keys, sparse=sparse, prompt_len=n, scale=0.5)
        assert lists_of(mask) == naive.prefill(
            q, keys, k=k, scale=0.5, block=shape[0], num_probes=shape[1],
            exact_from=max(0, n - dense_tail) // 32,
        )  # fmt: skip


class TestGate:
    """Section 2, and ATT-06: nothing is dropped while everything fits the budget."""

    @pytest.mark.parametrize(
        ("n", "k", "sparse"),
        [
            (64, 1, False),  # not more than two blocks of tokens
            (65, 1, True),
            (65, 2, True),
            (65, 3, False),  # 3 blocks fit a budget of 3
            (96, 3, False),
            (97, 3, True),
            (97, 4, False),  # ceil(97 / 32) = 4 blocks, none of them dropped
            *((n, 2, False) for n in (1, 10, 31, 32, 33, 50, 64)),
            (97, 10**6, False),
        ],
    )
    @pytest.mark.parametrize("selector", ["probe", "even"])
    def test_decode(self, n: int, k: int, sparse: bool, selector: str) -> None:
        blocks = decoded(spikes(n, {}), k=k, selector=selector)
        assert len(blocks) == (k if sparse else -(-n // 32))

    def test_an_exact_token_has_one_list_per_kv_head(self) -> None:
        mask = select_blocks(
            integers(0, 4, 1, 8), integers(1, 2, 97, 8), sparse=SparseAttention(k=4)
        )
        assert mask == BlockMask.full(q_len=1, kv_len=97, num_kv_heads=2)

    @pytest.mark.parametrize(("k", "first_sparse"), [(1, 2), (2, 2), (3, 3), (5, 5)])
    def test_prefill_tiles(self, k: int, first_sparse: int) -> None:
        mask = select_blocks(
            integers(0, 1, 320, 4),
            integers(1, 1, 320, 4),
            sparse=SparseAttention(k=k, dense_tail=0),
        )
        lengths = [len(mask.blocks(0, tile)) for tile in range(10)]
        assert lengths == [min(tile + 1, k if tile >= first_sparse else 10) for tile in range(10)]

    @pytest.mark.parametrize(("phase", "decode", "prefill"), [
        ("both", 2, 2), ("decode", 2, 10), ("prefill", 10, 2),
    ])  # fmt: skip
    def test_phase(self, phase: str, decode: int, prefill: int) -> None:
        sparse = SparseAttention(k=2, dense_tail=0, phase=phase)  # type: ignore[arg-type]
        q, k = integers(0, 1, 320, 4), integers(1, 1, 320, 4)
        assert len(select_blocks(q[:, -1:], k, sparse=sparse).blocks(0)) == decode
        assert len(select_blocks(q, k, sparse=sparse).blocks(0, 9)) == prefill


def test_the_same_blocks_again_and_again() -> None:
    q, k = integers(0, 4, 1, 16), integers(1, 2, 999, 16)
    sparse = SparseAttention(k=7)
    masks = {select_blocks(q.copy(), k.copy(), sparse=sparse) for _ in range(3)}
    assert len(masks) == 1


def test_what_lies_behind_the_arrays_is_not_read() -> None:
    """Views into larger arrays that hold NaN and huge values around them."""
    wide = np.full((2, 320, 12), np.nan, dtype=np.float32)
    k = wide[:, 8:305, 2:10]
    k[:] = integers(1, 2, 297, 8)
    q = integers(0, 4, 1, 8)
    sparse = SparseAttention(k=4)
    assert select_blocks(q, k, sparse=sparse) == select_blocks(q, k.copy(), sparse=sparse)


class TestErrors:
    @pytest.mark.parametrize(
        ("q_len", "kv_len", "prompt_len", "message"),
        [
            (10, 47, None, "whole tiles of 32 prompt positions .* positions 37 to 46"),
            (32, 50, None, "positions 18 to 49"),
            (18, 50, 60, "positions 32 to 49"),  # a chunk that ends inside a tile
            (2, 66, 64, "one query beyond the prompt of 64 tokens"),
        ],
    )
    def test_pieces_of_prompts(
        self, q_len: int, kv_len: int, prompt_len: int | None, message: str
    ) -> None:
        with pytest.raises(ShapeError, match=message):
            select_blocks(
                integers(0, 1, q_len, 4),
                integers(1, 1, kv_len, 4),
                sparse=SparseAttention(),
                prompt_len=prompt_len,
            )

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"importance": np.zeros(99)}, ShapeError, r"importance: expected \[Tkv=100\]"),
            (
                {"importance": np.zeros(100, dtype=np.int8)},
                ShapeError,
                "importance: expected float or int64, got int8",
            ),
            ({"importance": np.full(100, -1.0)}, ConfigError, "importance: .* negative"),
            ({"importance": np.full(100, np.nan)}, NumericalError, "importance: expected finite"),
            ({"prompt_len": 0}, ConfigError, "prompt_len: expected a positive integer, got 0"),
            ({"scale": np.inf}, ConfigError, "scale: expected a finite number"),
            ({"sparse": None}, ConfigError, "sparse: expected SparseAttention, got None"),
        ],
    )
    def test_options(self, options: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=rf"\[select_blocks\] {message}"):
            select_blocks(
                integers(0, 2, 1, 4),
                integers(1, 1, 100, 4),
                **{"sparse": SparseAttention(), **options},
            )

    def test_heads_that_do_not_divide(self) -> None:
        with pytest.raises(ShapeError, match="multiple of num_kv_heads=2 query heads, got 3"):
            select_blocks(integers(0, 3, 1, 4), integers(1, 2, 99, 4), sparse=SparseAttention())

    def test_nan_keys(self) -> None:
        k = integers(1, 1, 99, 4)
        k[0, 3, 2] = np.nan
        with pytest.raises(NumericalError, match=r"\[select_blocks\] k: expected finite"):
            select_blocks(integers(0, 1, 1, 4), k, sparse=SparseAttention())
