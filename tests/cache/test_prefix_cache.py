import numpy as np
import pytest

from kvsieve.cache import prefix_cache
from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache
from kvsieve.cache.prefix_cache import EXACT, Entry, PrefixCache
from kvsieve.cache.snapshot import SelectorSnapshot
from kvsieve.errors import ConfigError
from kvsieve.kernels.layout import PageLayout

NUM_BLOCKS = 12
SPARSE = b"sparse"


@pytest.fixture
def pool() -> BlockPool:
    layout = PageLayout(k_type="f16", v_type="f16", head_dim=16)
    return BlockPool(layout, num_layers=1, num_kv_heads=1, num_blocks=NUM_BLOCKS)


@pytest.fixture
def prefix(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool, max_bytes=NUM_BLOCKS * pool.block_bytes)


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Runs of equal tokens: (token, count)."""
    return np.concatenate([np.full(count, token, np.int32) for token, count in parts])


def keep(
    prefix: PrefixCache, tokens: np.ndarray, origins: list[bytes] | None = None
) -> list[Entry]:
    """A sequence of `tokens` that came and went; the first byte of a page is its first token."""
    cache = KVCache(prefix.pool, max_tokens=len(tokens))
    prefix.make_room(-(-len(tokens) // 32))
    cache.reserve(len(tokens))
    cache.commit(len(tokens))
    for place, block in enumerate(cache.block_table):
        prefix.pool.pages[:, block] = tokens[32 * place]
    origins = origins or [EXACT] * cache.num_blocks
    kept = prefix.insert(cache, tokens, origins)
    cache.release()
    prefix.settle()
    return kept


def found(prefix: PrefixCache, tokens: np.ndarray, origin: bytes = EXACT) -> int:
    origins = [origin] * (-(-len(tokens) // 32))
    match = prefix.match(tokens, origins, limit=len(tokens) - 1)
    pages = [int(prefix.pool.pages[0, block, 0, 0]) for block in match.blocks]
    assert pages == tokens[: match.num_tokens : 32].tolist()
    return match.num_tokens


def test_the_longest_common_beginning_is_found(prefix: PrefixCache):
    keep(prefix, ids((1, 32), (2, 32), (3, 10)))
    assert found(prefix, ids((1, 32), (2, 32), (3, 10))) == 73
    assert found(prefix, ids((1, 32), (2, 32), (3, 40))) == 74
    assert found(prefix, ids((1, 32), (2, 32), (3, 5), (9, 5))) == 69
    assert found(prefix, ids((1, 32), (2, 20), (9, 20))) == 52
    assert found(prefix, ids((1, 32), (9, 32))) == 32
    assert found(prefix, ids((1, 32))) == 31
    assert found(prefix, ids((1, 1))) == 0
    assert found(prefix, ids((9, 64))) == 0


def test_the_same_block_after_another_one_is_another_block(prefix: PrefixCache):
    keep(prefix, ids((1, 32), (2, 32)))
    assert found(prefix, ids((9, 32), (2, 32), (3, 1))) == 0


def test_a_block_is_kept_once_and_shared(prefix: PrefixCache, pool: BlockPool):
    one = keep(prefix, ids((1, 32), (2, 32)))
    two = keep(prefix, ids((1, 32), (2, 32), (3, 32)))
    assert [a is b for a, b in zip(one, two, strict=False)] == [True, True]
    assert len(prefix) == 3
    assert pool.num_free == NUM_BLOCKS - 3
    assert prefix.num_bytes == 3 * pool.block_bytes


def test_a_running_sequence_goes_on_with_the_block_that_is_there(
    prefix: PrefixCache, pool: BlockPool
):
    keep(prefix, ids((1, 32)))
    cache = KVCache(pool, max_tokens=64)
    cache.reserve(64)
    cache.commit(64)
    own = int(cache.block_table[0])
    (first, second) = prefix.insert(cache, ids((1, 32), (2, 32)), [EXACT, EXACT])
    assert cache.block_table[:2].tolist() == [first.block, second.block]
    assert first.block != own
    assert pool.holders(own) == 0
    # Both are held, so neither may go.
    prefix.clear()
    assert len(prefix) == 2
    cache.release()
    prefix.clear()
    assert len(prefix) == prefix.num_bytes == 0
    assert pool.num_free == NUM_BLOCKS


def test_blocks_can_be_added_as_they_are_finished(prefix: PrefixCache, pool: BlockPool):
    cache = KVCache(pool, max_tokens=96)
    cache.reserve(96)
    cache.commit(96)
    tokens = ids((1, 32), (2, 32), (3, 32))
    kept = prefix.insert(cache, tokens[:32], [EXACT])
    kept = prefix.insert(cache, tokens, [EXACT] * 3, after=kept)
    assert [entry.block for entry in kept] == cache.block_table[:3].tolist()
    assert kept[2].parent == kept[1].key


def test_a_longer_open_block_takes_the_place_of_a_shorter_one(prefix: PrefixCache):
    keep(prefix, ids((1, 32), (2, 5)))
    keep(prefix, ids((1, 32), (2, 20)))
    assert len(prefix) == 2
    keep(prefix, ids((1, 32), (2, 9)))
    assert len(prefix) == 2
    keep(prefix, ids((1, 32), (2, 5), (3, 5)))  # another continuation stays beside it
    assert len(prefix) == 3
    assert found(prefix, ids((1, 32), (2, 32))) == 52
    assert found(prefix, ids((1, 32), (2, 5), (3, 9))) == 42


def test_origins_keep_apart_what_was_computed_in_another_way(prefix: PrefixCache):
    tokens = ids((1, 32), (2, 32), (3, 32))
    keep(prefix, tokens, [EXACT, EXACT, SPARSE])
    assert found(prefix, ids((1, 32), (2, 32), (3, 32), (4, 1))) == 64
    match = prefix.match(
        ids((1, 32), (2, 32), (3, 32), (4, 1)), [EXACT, EXACT, SPARSE, SPARSE], limit=96
    )
    assert match.num_tokens == 96
    # A sparse tile is one only as a whole: no part of it is reused, whoever asks.
    for origin in (EXACT, SPARSE):
        part = prefix.match(ids((1, 32), (2, 32), (3, 20)), [EXACT, EXACT, origin], limit=83)
        assert part.num_tokens == 64


def test_equal_hashes_of_different_tokens_are_told_apart(
    prefix: PrefixCache, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prefix_cache, "_key", lambda parent, origin, tokens: b"one" + parent[:3])
    keep(prefix, ids((1, 32), (2, 32)))
    assert found(prefix, ids((1, 32), (2, 32), (5, 1))) == 64
    assert found(prefix, ids((3, 32), (2, 32), (5, 1))) == 0
    assert found(prefix, ids((1, 32), (3, 32), (5, 1))) == 32
    # And what collides is simply not kept.
    assert keep(prefix, ids((3, 32), (4, 32))) == []
    assert found(prefix, ids((1, 32), (2, 32), (5, 1))) == 64


def test_the_least_recently_used_goes_first_and_from_the_end_of_a_chain(pool: BlockPool):
    prefix = PrefixCache(pool, max_bytes=4 * pool.block_bytes)
    keep(prefix, ids((1, 32), (2, 32)))
    keep(prefix, ids((3, 32), (4, 32)))
    assert found(prefix, ids((1, 32), (2, 32), (9, 1))) == 64
    keep(prefix, ids((5, 32)))
    assert prefix.num_bytes == 4 * pool.block_bytes
    assert found(prefix, ids((3, 32), (4, 32), (9, 1))) == 32
    assert found(prefix, ids((1, 32), (2, 32), (9, 1))) == 64
    keep(prefix, ids((6, 32), (7, 32)))
    assert found(prefix, ids((1, 32), (2, 32), (9, 1))) == 64
    assert found(prefix, ids((3, 32), (4, 32), (9, 1))) == 0


def test_no_budget_keeps_nothing(pool: BlockPool):
    prefix = PrefixCache(pool, max_bytes=0)
    keep(prefix, ids((1, 32), (2, 32)))
    assert len(prefix) == prefix.num_bytes == 0
    assert pool.num_free == NUM_BLOCKS
    with pytest.raises(ConfigError, match="max_bytes"):
        PrefixCache(pool, max_bytes=-1)


def test_room_is_made_for_who_needs_pages(prefix: PrefixCache, pool: BlockPool):
    keep(prefix, ids(*((token, 32) for token in range(1, 9))))
    assert pool.num_free == NUM_BLOCKS - 8
    prefix.make_room(6)
    assert pool.num_free == 6
    prefix.make_room(NUM_BLOCKS + 1)
    assert pool.num_free == NUM_BLOCKS


def test_forgetting_spares_what_others_go_on_from(prefix: PrefixCache):
    one = keep(prefix, ids((1, 32), (2, 32), (3, 32)))
    keep(prefix, ids((1, 32), (2, 32), (4, 32)))
    prefix.forget(one)
    assert prefix.alive(one) == one[:2]
    assert found(prefix, ids((1, 32), (2, 32), (4, 32), (9, 1))) == 96
    assert len(prefix) == 3


def snapshot(since: int, at: int) -> SelectorSnapshot:
    return SelectorSnapshot(
        since=since,
        num_tokens=at,
        first_group=0,
        index=None,
        importance=np.zeros((1, at), np.int64),
    )


def test_only_positions_with_a_whole_chain_of_snapshots_count(prefix: PrefixCache):
    tokens = ids((1, 32), (2, 32), (3, 32), (4, 32), (5, 1))
    entries = keep(prefix, tokens[:128])

    def reusable(limit: int = 128) -> tuple[int, list[int]]:
        match = prefix.match(tokens, [EXACT] * 5, limit=limit, snapshot_kind="a")
        return match.num_tokens, [one.num_tokens for one in match.snapshots]

    assert reusable() == (0, [])
    prefix.add_snapshot(entries[1], "a", snapshot(0, 64))
    prefix.add_snapshot(entries[3], "a", snapshot(96, 128))  # its beginning is not there
    prefix.add_snapshot(entries[2], "b", snapshot(64, 96))
    assert reusable() == (64, [64])
    prefix.add_snapshot(entries[2], "a", snapshot(64, 96))
    assert reusable() == (128, [64, 96, 128])
    assert reusable(limit=127) == (96, [64, 96])
    assert found(prefix, tokens) == 128


def test_snapshots_count_and_go_with_their_block(prefix: PrefixCache, pool: BlockPool):
    entries = keep(prefix, ids((1, 32)))
    before = prefix.num_bytes
    one = snapshot(0, 32)
    prefix.add_snapshot(entries[0], "a", one)
    prefix.add_snapshot(entries[0], "a", snapshot(0, 32))  # the first one stays
    assert prefix.num_bytes == before + 8 * 32
    assert entries[0].snapshots["a"] is one
    prefix.clear()
    assert prefix.num_bytes == 0
    prefix.add_snapshot(entries[0], "b", one)  # too late
    assert prefix.num_bytes == 0
