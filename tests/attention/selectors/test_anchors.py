"""`select_blocks` with selector `anchors` on plain arrays."""

import numpy as np

from kvsieve.attention.config import SparseAttention
from kvsieve.attention.selection import select_blocks


def arrays(num_queries: int, num_tokens: int = 640) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    q = random.standard_normal((4, num_queries, 32)).astype(np.float32)
    k = (0.1 * random.standard_normal((2, num_tokens, 32))).astype(np.float32)
    return q, k


def test_the_block_with_the_key_that_a_query_wants_is_read() -> None:
    q, k = arrays(1)
    k[:, 9 * 32 + 16] = 5 * q[1, 0]  # an evenly spaced key: no row has shown what is attended to
    sparse = SparseAttention(selector="anchors", k=4)
    mask = select_blocks(q, k, sparse=sparse)
    assert mask.blocks(1).tolist() == [0, 9, 18, 19]
    assert mask.lists_per_kv_head == 2


def test_the_row_behind_a_block_chooses_its_anchors() -> None:
    q, k = arrays(320)
    k[:, 11 * 32 + 5] = 5 * q[1, -1]  # no evenly spaced key
    row = 13 * 32 - 1 - 320
    q[:, row] = 3 * k[0, 11 * 32 + 5]  # the last row of block 12 attends to it
    last = SparseAttention(selector="anchors", k=4, share="group", dense_tail=0)
    seen = select_blocks(q, k, sparse=last)
    assert 11 in seen.blocks(0, tile=seen.num_tiles - 1)


def test_a_mass_of_almost_everything_reads_almost_everything() -> None:
    q, k = arrays(1)
    few = SparseAttention(selector="anchors", mass=0.3, k_min=3, k_max=20)
    many = SparseAttention(selector="anchors", mass=0.99, k_min=3, k_max=20)
    # Keys are nearly alike, so each of the 20 blocks holds about a twentieth.
    assert all(5 <= len(select_blocks(q, k, sparse=few).blocks(h)) <= 8 for h in range(4))
    assert all(len(select_blocks(q, k, sparse=many).blocks(h)) >= 19 for h in range(4))


def test_everything_is_read_where_it_fits() -> None:
    q, k = arrays(1, num_tokens=97)
    mask = select_blocks(q, k, sparse=SparseAttention(selector="anchors", k=4))
    assert mask.density == 1
