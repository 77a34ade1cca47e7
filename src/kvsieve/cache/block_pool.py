"""The pages that all sequences share, handed out one block of 32 tokens at a time."""

import contextlib
import heapq
import math
import mmap
from collections.abc import Iterable

import numpy as np

from kvsieve.errors import CapacityError, ConfigError
from kvsieve.kernels.layout import PageLayout
from kvsieve.types import U8


class BlockPool:
    """A fixed number of pages; a block id names one page per layer and KV head.

    ``pages`` is ``u8 [num_layers, num_blocks, num_kv_heads, page_bytes]``. It is an anonymous
    mapping: an address range at first, which takes memory only where it has been written.

    A block may have several holders; it is free again when the last one has given it back. Who
    holds a block with others must not write to it.
    """

    def __init__(
        self, layout: PageLayout, *, num_layers: int, num_kv_heads: int, num_blocks: int
    ) -> None:
        sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "num_blocks": num_blocks}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"[BlockPool] {name}: expected at least 1, got {size}")
        self.layout = layout
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.num_blocks = num_blocks
        self.pages = _anonymous((num_layers, num_blocks, num_kv_heads, layout.page_bytes))
        # A heap hands out the lowest free id, so memory touched by one run serves the next.
        self._free = list(range(num_blocks))
        self._holders = np.zeros(num_blocks, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that can still be allocated."""
        return len(self._free)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers and heads."""
        return self.num_layers * self.num_kv_heads * self.layout.page_bytes

    def holders(self, block: int) -> int:
        """How many hold `block`; 0: it is free."""
        return int(self._holders[block])

    def allocate(self) -> int:
        """Take one block; its bytes are whatever the last owner left."""
        if not self._free:
            raise CapacityError(
                f"[BlockPool.allocate] expected a free block, got {self.num_blocks} of "
                f"{self.num_blocks} in use"
            )
        block = heapq.heappop(self._free)
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Become one more holder of blocks in use; of all of them, or of none."""
        for block in self._checked("share", blocks):
            self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. A block that is not in use is an error, and nothing is freed then."""
        for block in self._checked("free", blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                heapq.heappush(self._free, block)

    def copy(self, source: int, target: int) -> None:
        """Copy the bytes of a block, in every layer and head."""
        self.pages[:, target] = self.pages[:, source]

    def _checked(self, function: str, blocks: Iterable[int]) -> list[int]:
        listed = list(blocks)
        for block in listed:
            if not 0 <= block < self.num_blocks or not self._holders[block]:
                raise ConfigError(
                    f"[BlockPool.{function}] blocks: expected blocks in use, got {block}"
                )
        if len(set(listed)) != len(listed):
            raise ConfigError(
                f"[BlockPool.{function}] blocks: expected each block once, got {listed}"
            )
        return listed


def _anonymous(shape: tuple[int, ...]) -> U8:
    """Zeroed bytes from the system, private to this process; the array keeps the mapping alive."""
    num_bytes = math.prod(shape)
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"[BlockPool] cache: expected {num_bytes / 2**20:.0f} MiB of address space, "
            f"got {error} (a smaller context needs less)"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Attention walks the pages in order: huge ones save it an address translation each. At
        # most 2 MiB per layer more than what is used become memory.
        with contextlib.suppress(OSError):  # a wish: a system without them serves small pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8).reshape(shape)
