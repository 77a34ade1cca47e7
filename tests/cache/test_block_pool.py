from pathlib import Path

import numpy as np
import pytest

from kvsieve.cache.block_pool import BlockPool
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.kernels.layout import PageLayout

# Keys and values of one page: 32 tokens x 64 dims x 1 byte, and a f32 scale per token.
Q8_PAGE_BYTES = 2 * (32 * 64 + 32 * 4)


def make_pool(num_blocks: int = 4, **sizes: int) -> BlockPool:
    layout = PageLayout(k_type="q8_0", v_type="q8_0", head_dim=64)
    return BlockPool(layout, **{"num_layers": 2, "num_kv_heads": 3, **sizes}, num_blocks=num_blocks)


def test_pages_are_one_zeroed_writable_array_by_layer_block_and_head():
    pool = make_pool()
    assert pool.pages.shape == (2, 4, 3, Q8_PAGE_BYTES)
    assert pool.pages.dtype == np.uint8
    assert pool.pages.flags.c_contiguous
    assert pool.pages.flags.writeable
    assert not pool.pages.any()


def test_blocks_are_handed_out_once_each_lowest_first():
    pool = make_pool()
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    assert pool.num_free == 0


def test_freed_blocks_come_back_lowest_first_whatever_order_they_were_freed_in():
    pool = make_pool()
    for _ in range(4):
        pool.allocate()
    pool.free([3, 0, 2])
    assert pool.num_free == 3
    assert [pool.allocate() for _ in range(3)] == [0, 2, 3]


def test_an_empty_pool_says_so():
    pool = make_pool(num_blocks=1)
    pool.allocate()
    with pytest.raises(CapacityError, match="1 of 1 in use"):
        pool.allocate()


@pytest.mark.parametrize("blocks", [[0, 9], [0, -1], [0, 3], [0, 0]])
def test_a_bad_free_changes_nothing(blocks: list[int]):
    pool = make_pool()
    pool.allocate()
    with pytest.raises(ConfigError, match=r"BlockPool\.free"):
        pool.free(blocks)
    assert pool.num_free == 3
    pool.free([0])
    assert pool.num_free == 4


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "num_blocks"])
def test_sizes_are_at_least_one(name: str):
    with pytest.raises(ConfigError, match=f"{name}: expected at least 1, got 0"):
        make_pool(**{name: 0})


def test_memory_is_taken_only_where_it_is_written():
    def resident_mib() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096 / 2**20

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    before = resident_mib()
    pool = make_pool(num_blocks=2**16)
    assert pool.pages.nbytes > 1.5 * 2**30
    pool.pages[:, :4] = 1
    assert resident_mib() - before < 64


def test_more_address_space_than_there_is_is_a_named_error():
    with pytest.raises(CapacityError, match="MiB of address space"):
        make_pool(num_blocks=2**50)


def test_a_shared_block_is_free_when_its_last_holder_gave_it_back():
    pool = make_pool()
    block = pool.allocate()
    pool.share([block])
    assert pool.holders(block) == 2
    pool.free([block])
    assert (pool.holders(block), pool.num_free) == (1, 3)
    pool.free([block])
    assert (pool.holders(block), pool.num_free) == (0, 4)
    with pytest.raises(ConfigError, match="blocks in use"):
        pool.free([block])


@pytest.mark.parametrize("blocks", [[0, 3], [0, 0]])
def test_a_bad_share_changes_nothing(blocks: list[int]):
    pool = make_pool()
    pool.allocate()
    with pytest.raises(ConfigError, match=r"BlockPool\.share"):
        pool.share(blocks)
    assert pool.holders(0) == 1


def test_a_copy_has_every_layers_bytes():
    pool = make_pool()
    source, target = pool.allocate(), pool.allocate()
    pool.pages[:, source] = np.arange(2, dtype=np.uint8)[:, None, None] + 7
    pool.copy(source, target)
    assert pool.pages[0, target].min() == pool.pages[0, target].max() == 7
    assert pool.pages[1, target].min() == pool.pages[1, target].max() == 8
    assert not pool.pages[:, 2:].any()
    assert pool.block_bytes == 2 * 3 * Q8_PAGE_BYTES
