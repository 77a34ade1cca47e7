import numpy as np
import pytest

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache, blocks_for
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.kernels.backend import SparsePlan
from kvsieve.kernels.layout import IndexLayout, PageLayout
from kvsieve.kernels.reference import ReferenceBackend

LAYERS, KV_HEADS, DIM = 2, 3, 64


@pytest.fixture
def pool() -> BlockPool:
    layout = PageLayout(k_type="q8_0", v_type="q8_0", head_dim=DIM)
    return BlockPool(layout, num_layers=LAYERS, num_kv_heads=KV_HEADS, num_blocks=6)


@pytest.mark.parametrize(
    ("num_tokens", "blocks"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)]
)
def test_blocks_for(num_tokens: int, blocks: int):
    assert blocks_for(num_tokens) == blocks


def test_reserve_takes_only_what_is_missing(pool: BlockPool):
    cache = KVCache(pool, max_tokens=128)
    cache.reserve(33)
    assert (cache.num_blocks, pool.num_free) == (2, 4)
    cache.reserve(64)
    assert (cache.num_blocks, pool.num_free) == (2, 4)
    cache.reserve(65)
    assert (cache.num_blocks, pool.num_free) == (3, 3)
    assert cache.block_table[:3].tolist() == [0, 1, 2]


def test_two_sequences_share_the_pool_and_no_page(pool: BlockPool):
    one, two = KVCache(pool, max_tokens=96), KVCache(pool, max_tokens=96)
    one.reserve(32)
    two.reserve(32)
    one.reserve(96)
    assert one.block_table[:3].tolist() == [0, 2, 3]
    assert two.block_table[:1].tolist() == [1]


def test_reserve_takes_nothing_when_the_pool_has_too_little(pool: BlockPool):
    other = KVCache(pool, max_tokens=128)
    other.reserve(128)
    cache = KVCache(pool, max_tokens=160)
    with pytest.raises(CapacityError, match=r"at most 2 more blocks .* need 3 more"):
        cache.reserve(96)
    assert (cache.num_blocks, pool.num_free) == (0, 2)


def test_reserve_beyond_the_sequences_own_limit(pool: BlockPool):
    cache = KVCache(pool, max_tokens=40)
    with pytest.raises(CapacityError, match="expected at most 40, got 41"):
        cache.reserve(41)


def test_a_segment_describes_its_rows_and_the_pages_behind_them(pool: BlockPool):
    cache = KVCache(pool, max_tokens=128)
    cache.reserve(64)
    cache.commit(40)
    plan = SparsePlan(
        selector="even", k=4, block_size=32, num_probes=8, share="head", exact_from_tile=0
    )
    segment = cache.segment(start=40, q_len=24, is_prefill=True, sparse=plan)
    assert (segment.start, segment.q_len, segment.is_prefill) == (40, 24, True)
    assert segment.pages is pool.pages
    assert segment.block_table.tolist() == [0, 1]
    assert segment.block_table.dtype == np.int32
    assert segment.sparse is plan
    assert segment.index is None
    assert segment.importance is None
    assert segment.record_importance is False


@pytest.mark.parametrize(("start", "q_len"), [(0, 1), (33, 1), (32, 0)])
def test_a_segment_starts_where_the_cache_ends(pool: BlockPool, start: int, q_len: int):
    cache = KVCache(pool, max_tokens=128)
    cache.reserve(64)
    cache.commit(32)
    with pytest.raises(ConfigError, match="expected start=32"):
        cache.segment(start=start, q_len=q_len, is_prefill=True)


def test_a_segment_needs_its_pages_reserved(pool: BlockPool):
    cache = KVCache(pool, max_tokens=128)
    cache.reserve(32)
    with pytest.raises(CapacityError, match="pages reserved for 33 tokens, got 32"):
        cache.segment(start=0, q_len=33, is_prefill=True)


def test_selector_index_and_importance_are_sized_by_the_sequence(pool: BlockPool):
    index_layout = IndexLayout(head_dim=DIM, block_size=32, num_probes=8)
    cache = KVCache(pool, max_tokens=600, index_layout=index_layout, keeps_importance=True)
    assert cache.index is not None
    assert cache.importance is not None
    # 600 tokens are 19 blocks of 32, two groups of 16; an entry is a key and its f32 scale.
    assert cache.index.shape == (LAYERS, 2, KV_HEADS, 8 * 16 * (DIM + 4))
    assert cache.importance.shape == (LAYERS, 600)
    assert cache.importance.dtype == np.int64
    cache.reserve(32)
    segment = cache.segment(start=0, q_len=32, is_prefill=True, record_importance=True)
    assert segment.index is cache.index
    assert segment.index_layout is index_layout
    assert segment.importance is cache.importance
    assert segment.record_importance


@pytest.mark.parametrize("num_tokens", [9, 65])
def test_commit_moves_forward_within_the_reserved_pages(pool: BlockPool, num_tokens: int):
    cache = KVCache(pool, max_tokens=128)
    cache.reserve(64)
    cache.commit(10)
    with pytest.raises(ConfigError, match=f"expected 10 to 64, got {num_tokens}"):
        cache.commit(num_tokens)
    assert cache.num_tokens == 10


def test_truncate_frees_whole_blocks_and_forgets_importance_behind_the_cut(pool: BlockPool):
    cache = KVCache(pool, max_tokens=96, keeps_importance=True)
    cache.reserve(96)
    cache.commit(96)
    assert cache.importance is not None
    cache.importance[:] = 7
    cache.truncate(33)
    assert (cache.num_tokens, cache.num_blocks, pool.num_free) == (33, 2, 4)
    assert (cache.importance[:, :33] == 7).all()
    assert not cache.importance[:, 33:].any()


def test_truncate_cannot_add_tokens(pool: BlockPool):
    cache = KVCache(pool, max_tokens=96)
    cache.reserve(32)
    cache.commit(10)
    with pytest.raises(ConfigError, match="expected 0 to 10, got 11"):
        cache.truncate(11)


def test_release_returns_reserved_pages_too_and_may_be_repeated(pool: BlockPool):
    cache = KVCache(pool, max_tokens=96)
    cache.reserve(96)
    cache.commit(5)
    cache.release()
    cache.release()
    assert pool.num_free == 6
    assert (cache.num_tokens, cache.num_blocks) == (0, 0)


def test_max_tokens_is_at_least_one(pool: BlockPool):
    with pytest.raises(ConfigError, match="max_tokens: expected at least 1, got 0"):
        KVCache(pool, max_tokens=0)


def test_read_gives_the_complete_tokens_as_they_are_stored():
    layout = PageLayout(k_type="f32", v_type="q8_0", head_dim=DIM)
    pool = BlockPool(layout, num_layers=LAYERS, num_kv_heads=KV_HEADS, num_blocks=6)
    KVCache(pool, max_tokens=32).reserve(1)  # so that page and block numbers differ
    cache = KVCache(pool, max_tokens=96)
    cache.reserve(70)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 70, KV_HEADS, DIM), dtype=np.float32)
    for layer in range(LAYERS):
        segment = cache.segment(start=0, q_len=70, is_prefill=True)
        ReferenceBackend().append(segment, layer, k + layer, v)
    cache.commit(66)
    keys, values = cache.read(1)
    assert np.array_equal(keys, (k + 1)[:66].transpose(1, 0, 2))
    assert values.shape == (KV_HEADS, 66, DIM)
    # Half a step of 8 bits.
    assert np.abs(values - v[:66].transpose(1, 0, 2)).max() <= np.abs(v).max() / 127 / 2 * 1.01
