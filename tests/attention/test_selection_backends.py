"""Both backends choose and record, over a paged cache, what docs/selection.md says.

The same naive rules that `select_blocks` is held to, so that the engine and the plain arrays
cannot drift apart; and importance (section 5) against the float64 oracle.
"""

from typing import Any

import numpy as np
import pytest

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.dense import dense_attention
from kvsieve.attention.selection import attend
from kvsieve.kernels.backend import BlockLists, SparsePlan
from tests.attention import naive
from tests.attention.caches import backend_named, filled_segment, token_rows

HEADS = (4, 2)
DIM = 16


def integers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def plan(**fields: Any) -> SparsePlan:
    defaults = {
        "selector": "probe", "k": 3, "block_size": 32, "num_probes": 8, "share": "head",
        "exact_from_tile": 10**6,
    }  # fmt: skip
    return SparsePlan(**{**defaults, **fields})


def lists_of(lists: BlockLists) -> naive.Lists:
    rows = [row.tolist() for row in np.split(lists.indices, lists.indptr[1:-1])]
    tiles = lists.num_tiles
    return [rows[head * tiles : (head + 1) * tiles] for head in range(lists.num_heads)]


@pytest.mark.parametrize("selector", ["probe", "even"])
@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize(
    ("n", "k", "block", "num_probes"),
    [(97, 3, 32, 8), (300, 4, 32, 8), (320, 5, 32, 3), (333, 1, 32, 8), (333, 2, 64, 8)],
)
@pytest.mark.parametrize("with_importance", [False, True])
def test_decode(
    *, backend: str, selector: str, share: str, n: int, k: int, block: int, num_probes: int,
    with_importance: bool,
) -> None:  # fmt: skip
    core = backend_named(backend)
    keys, q = integers(n, HEADS[1], n, DIM), integers(k, HEADS[0], 1, DIM)
    received = np.random.default_rng(n).integers(0, 3, (1, n)) if with_importance else None
    sparse = plan(selector=selector, k=k, block_size=block, num_probes=num_probes, share=share)
    segment = filled_segment(core, keys, keys, q_len=1, sparse=sparse, importance=received)
    lists = core.select(segment, 0, token_rows(q), scale=0.5)
    assert lists is not None
    assert lists_of(lists) == naive.decode(
        q[:, 0], keys, k=k, selector=selector, share=share, scale=0.5, block=block,
        num_probes=num_probes, importance=None if received is None else received[0],
    )  # fmt: skip


@pytest.mark.parametrize("selector", ["probe", "even"])
@pytest.mark.parametrize(
    ("n", "start", "k", "block", "exact_from"),
    [(97, 0, 2, 32, 99), (250, 64, 4, 32, 99), (330, 0, 1, 32, 9), (330, 160, 2, 64, 9)],
)
def test_prefill(
    *, backend: str, selector: str, n: int, start: int, k: int, block: int, exact_from: int
) -> None:
    core = backend_named(backend)
    keys, q = integers(n, HEADS[1], n, DIM), integers(k, HEADS[0], n - start, DIM)
    sparse = plan(selector=selector, k=k, block_size=block, exact_from_tile=exact_from)
    segment = filled_segment(core, keys, keys, q_len=n - start, sparse=sparse)
    lists = core.select(segment, 0, token_rows(q), scale=0.5)
    assert lists is not None
    assert lists_of(lists) == naive.prefill(
        q, keys, k=k, scale=0.5, block=block, exact_from=exact_from
    )


@pytest.mark.parametrize(("n", "k"), [(64, 1), (97, 4), (320, 10), (5, 1)])
def test_the_gate_leaves_everything_exact(backend: str, n: int, k: int) -> None:
    core = backend_named(backend)
    keys, q = integers(n, HEADS[1], n, DIM), integers(k, HEADS[0], n, DIM)
    for rows in (q, q[:, -1:]):
        segment = filled_segment(core, keys, keys, q_len=rows.shape[1], sparse=plan(k=k))
        assert core.select(segment, 0, token_rows(rows), scale=1.0) is None


class TestImportance:
    """Section 5: probability received, summed over heads and queries, of what ran."""

    def recorded(
        self, backend: str, n: int, *, mask: BlockMask | None = None, edges: tuple[int, ...] = ()
    ) -> np.ndarray:
        """Importance after a prompt of `n` tokens prefilled up to each of `edges` in turn."""
        core = backend_named(backend)
        q, k = normal(0, HEADS[0], n, DIM), normal(1, HEADS[1], n, DIM)
        received = np.zeros((1, n), dtype=np.int64)
        starts = (0, *edges)
        for start, stop in zip(starts, (*edges, n), strict=True):
            segment = filled_segment(
                core, k[:, :stop], k[:, :stop], q_len=stop - start, is_prefill=True,
                importance=received, record_importance=True,
            )  # fmt: skip
            lists = None if mask is None else mask.to_block_lists()
            core.attend(segment, 0, token_rows(q[:, start:stop]), scale=0.25, lists=lists)
        return received[0]

    @pytest.mark.parametrize("n", [1, 33, 100])
    def test_exact(self, backend: str, n: int) -> None:
        q, k = normal(0, HEADS[0], n, DIM), normal(1, HEADS[1], n, DIM)
        expected = dense_attention(q, k, k, scale=0.25).probs.sum(axis=(0, 1))
        got = self.recorded(backend, n) / 2**24
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)

    def test_sparse_prefill_records_the_sparse_probabilities(self, backend: str) -> None:
        q, k = normal(0, HEADS[0], 100, DIM), normal(1, HEADS[1], 100, DIM)
        mask = BlockMask.from_lists([[[0], [1], [0, 2], [2, 3]]] * 2, q_len=100, kv_len=100)
        probs = dense_attention(q, k, k, mask.to_dense(), scale=0.25).probs
        got = self.recorded(backend, 100, mask=mask) / 2**24
        np.testing.assert_allclose(got, probs.sum(axis=(0, 1)), rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("edges", [(32,), (96,), (32, 64, 96)])
    def test_chunking_does_not_matter_at_all(self, backend: str, edges: tuple[int, ...]) -> None:
        whole = self.recorded(backend, 100)
        np.testing.assert_array_equal(self.recorded(backend, 100, edges=edges), whole)


def test_attend_is_what_a_paged_cache_gives(backend: str) -> None:
    """Shuffled pages among stale ones, bit for bit the plain arrays' result."""
    core = backend_named(backend)
    q, k, v = normal(0, 4, 40, DIM), normal(1, 2, 100, DIM), normal(2, 2, 100, DIM)
    segment = filled_segment(core, k, v, q_len=40, cache_type="q8_0")
    paged = core.attend(segment, 0, token_rows(q), scale=0.25, lists=None)
    plain = attend(q, k, v, scale=0.25, cache_type="q8_0", backend=core)
    # Padding to 32 dimensions adds zeros to every dot product and to no scale.
    np.testing.assert_array_equal(token_rows(plain), paged)
