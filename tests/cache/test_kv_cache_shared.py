"""A cache that begins with blocks of others, and what selectors kept of them."""

import numpy as np
import pytest

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.kernels.layout import IndexLayout, PageLayout

LAYERS, KV_HEADS, DIM = 2, 3, 64
INDEX = IndexLayout(head_dim=DIM, block_size=32, num_probes=8)


@pytest.fixture
def pool() -> BlockPool:
    layout = PageLayout(k_type="q8_0", v_type="q8_0", head_dim=DIM)
    return BlockPool(layout, num_layers=LAYERS, num_kv_heads=KV_HEADS, num_blocks=6)


def filled(pool: BlockPool, num_tokens: int) -> KVCache:
    cache = KVCache(pool, max_tokens=160)
    cache.reserve(num_tokens)
    cache.commit(num_tokens)
    for place in range(cache.num_blocks):
        pool.pages[:, cache.block_table[place]] = 10 + place
    return cache


def blocks(cache: KVCache) -> list[int]:
    return cache.block_table[: cache.num_blocks].tolist()


def test_full_blocks_are_shared_and_an_open_one_is_copied(pool: BlockPool):
    one, two = filled(pool, 80), KVCache(pool, max_tokens=160)
    two.adopt(blocks(one), num_tokens=70)
    assert (two.num_tokens, two.num_blocks) == (70, 3)
    assert blocks(two)[:2] == blocks(one)[:2]
    assert blocks(two)[2] != blocks(one)[2]
    assert pool.pages[:, blocks(two)[2]].min() == pool.pages[:, blocks(two)[2]].max() == 12
    # Writing to the copy leaves the original alone.
    pool.pages[:, blocks(two)[2]] = 99
    assert pool.pages[:, blocks(one)[2]].max() == 12
    one.release()
    assert pool.num_free == 3
    two.release()
    assert pool.num_free == 6


def test_full_blocks_need_no_free_page(pool: BlockPool):
    one, other, two = filled(pool, 64), KVCache(pool, max_tokens=128), KVCache(pool, max_tokens=64)
    other.reserve(128)
    assert pool.num_free == 0
    two.adopt(blocks(one), num_tokens=64)
    assert blocks(two) == blocks(one)


def test_an_adoption_that_fails_changes_nothing(pool: BlockPool):
    one, other = filled(pool, 80), KVCache(pool, max_tokens=96)
    other.reserve(96)
    two = KVCache(pool, max_tokens=80)
    with pytest.raises(CapacityError):
        two.adopt(blocks(one), num_tokens=70)
    assert (two.num_blocks, two.num_tokens) == (0, 0)
    assert [pool.holders(block) for block in blocks(one)] == [1, 1, 1]
    for num_tokens, table in ((0, []), (64, blocks(one)), (81, blocks(one))):
        with pytest.raises(ConfigError, match=r"KVCache\.adopt"):
            two.adopt(table, num_tokens=num_tokens)
    with pytest.raises(ConfigError, match="in an empty cache"):
        one.adopt(blocks(one), num_tokens=70)


def test_an_equal_block_takes_the_place_of_ones_own(pool: BlockPool):
    one, two = filled(pool, 64), filled(pool, 64)
    own = blocks(two)
    two.exchange(1, blocks(one)[1])
    two.exchange(1, blocks(one)[1])
    assert blocks(two) == [own[0], blocks(one)[1]]
    assert pool.holders(own[1]) == 0
    assert pool.holders(blocks(one)[1]) == 2


def test_snapshots_bring_back_what_selectors_kept(pool: BlockPool):
    big = BlockPool(pool.layout, num_layers=LAYERS, num_kv_heads=KV_HEADS, num_blocks=64)

    def empty() -> KVCache:
        return KVCache(big, max_tokens=1100, index_layout=INDEX, keeps_importance=True)

    one, rng = empty(), np.random.default_rng(0)
    assert one.index is not None
    assert one.importance is not None
    snapshots = []
    since = 0
    for at in (512, 640, 1024):
        one.reserve(at)
        one.commit(at)
        # A step fills groups of 16 blocks, from the open one on, and adds to every token so far.
        open_group = since // 512
        one.index[:, open_group : -(-at // 512)] = rng.integers(0, 255, one.index.shape[2:])
        one.importance[:, :at] += rng.integers(0, 99, (LAYERS, at))
        snapshot = one.snapshot(since=since)
        assert snapshot is not None
        snapshots.append(snapshot)
        since = at
    two = empty()
    two.restore(snapshots)
    assert two.index is not None
    assert two.importance is not None
    assert one.index.any()
    assert np.array_equal(two.index, one.index)
    assert np.array_equal(two.importance, one.importance)
    # They are copies: the sequence goes on.
    before = snapshots[-1].importance
    assert before is not None
    one.importance += 1
    assert np.array_equal(two.importance[:, :1024], before)


def test_a_sequence_without_selector_data_has_no_snapshot(pool: BlockPool):
    assert filled(pool, 64).snapshot(since=0) is None
