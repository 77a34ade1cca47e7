"""The cache of one sequence: its pages in order, and what selectors keep beside them."""

from collections.abc import Sequence

import numpy as np

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.snapshot import SelectorSnapshot
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.kernels.backend import Segment, SparsePlan
from kvsieve.kernels.layout import SelectorIndex
from kvsieve.kernels.reference.pages import read_keys, read_values
from kvsieve.types import BLOCK_SIZE, F32, I32, I64, U8


class KVCache:
    """Block table, selector index and importance of a sequence of at most `max_tokens` tokens.

    ``num_tokens`` counts the tokens whose keys and values are complete in every layer; a step
    reserves pages, writes rows behind that mark, and `commit` moves the mark. What an
    interrupted step wrote is therefore never read.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_tokens: int,
        index_layout: SelectorIndex | None = None,
        keeps_importance: bool = False,
    ) -> None:
        if max_tokens < 1:
            raise ConfigError(f"[KVCache] max_tokens: expected at least 1, got {max_tokens}")
        self.pool = pool
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.num_blocks = 0
        self.block_table: I32 = np.zeros(blocks_for(max_tokens), np.int32)
        self.index_layout = index_layout
        # np.zeros of a large array takes memory only where it is written, as the pool does.
        self.index: U8 | None = None
        if index_layout is not None:
            groups = index_layout.num_groups(max_tokens)
            shape = (pool.num_layers, groups, pool.num_kv_heads, index_layout.record_bytes)
            self.index = np.zeros(shape, np.uint8)
        self.importance: I64 | None = None
        if keeps_importance:
            self.importance = np.zeros((pool.num_layers, max_tokens), np.int64)

    def reserve(self, num_tokens: int) -> None:
        """Own pages for the first `num_tokens` tokens; takes all that are missing, or none."""
        if num_tokens > self.max_tokens:
            raise CapacityError(
                f"[KVCache.reserve] num_tokens: expected at most {self.max_tokens}, "
                f"got {num_tokens}"
            )
        missing = blocks_for(num_tokens) - self.num_blocks
        if missing > self.pool.num_free:
            raise CapacityError(
                f"[KVCache.reserve] num_tokens: expected at most {self.pool.num_free} more blocks "
                f"of {BLOCK_SIZE} tokens, got {num_tokens} tokens, which need {missing} more"
            )
        for _ in range(missing):
            self.block_table[self.num_blocks] = self.pool.allocate()
            self.num_blocks += 1

    def segment(
        self,
        *,
        start: int,
        q_len: int,
        is_prefill: bool,
        sparse: SparsePlan | None = None,
        record_importance: bool = False,
    ) -> Segment:
        """Describe rows ``start .. start + q_len`` to the kernels; their pages are reserved."""
        if start != self.num_tokens or q_len < 1:
            raise ConfigError(
                f"[KVCache.segment] start, q_len: expected start={self.num_tokens} (tokens in the "
                f"cache) and at least one row, got start={start}, q_len={q_len}"
            )
        if blocks_for(start + q_len) > self.num_blocks:
            raise CapacityError(
                f"[KVCache.segment] q_len: expected pages reserved for {start + q_len} tokens, "
                f"got {self.num_blocks * BLOCK_SIZE}"
            )
        return Segment(
            start=start,
            q_len=q_len,
            is_prefill=is_prefill,
            layout=self.pool.layout,
            pages=self.pool.pages,
            block_table=self.block_table[: self.num_blocks],
            sparse=sparse,
            index_layout=self.index_layout,
            index=self.index,
            importance=self.importance,
            record_importance=record_importance,
        )

    def read(self, layer: int) -> tuple[F32, F32]:
        """Keys and values of the complete tokens, f32 ``[Hkv, num_tokens, D]``, for evaluation."""
        segment = Segment(
            start=0,
            q_len=self.num_tokens,
            is_prefill=True,
            layout=self.pool.layout,
            pages=self.pool.pages,
            block_table=self.block_table[: self.num_blocks],
        )
        blocks = np.arange(blocks_for(self.num_tokens))
        sides = [
            [side(segment, layer, head, blocks).floats() for head in range(self.pool.num_kv_heads)]
            for side in (read_keys, read_values)
        ]
        keys, values = (np.stack(heads)[:, : self.num_tokens] for heads in sides)
        return keys, values

    def commit(self, num_tokens: int) -> None:
        """Mark the first `num_tokens` tokens as complete: a step has run through every layer."""
        if not self.num_tokens <= num_tokens <= self.num_blocks * BLOCK_SIZE:
            raise ConfigError(
                f"[KVCache.commit] num_tokens: expected {self.num_tokens} to "
                f"{self.num_blocks * BLOCK_SIZE}, got {num_tokens}"
            )
        self.num_tokens = num_tokens

    def adopt(self, blocks: Sequence[int], *, num_tokens: int) -> None:
        """Begin with tokens that others computed: `blocks` hold the first `num_tokens`.

        A last block that is not full of them is copied, because this sequence will write to it;
        the others are shared. Nothing has changed if this raises.

        Raises
        ------
        ConfigError
            The cache is not empty, or the blocks do not fit the tokens.
        CapacityError
            There is no free block for the copy.
        """
        if self.num_blocks or not 0 < num_tokens <= self.max_tokens:
            raise ConfigError(
                f"[KVCache.adopt] num_tokens: expected 1 to {self.max_tokens} in an empty cache, "
                f"got {num_tokens} with {self.num_blocks} blocks there"
            )
        if len(blocks) != blocks_for(num_tokens):
            raise ConfigError(
                f"[KVCache.adopt] blocks: expected {blocks_for(num_tokens)} for {num_tokens} "
                f"tokens, got {len(blocks)}"
            )
        full = num_tokens // BLOCK_SIZE
        self.pool.share(blocks[:full])
        try:
            copied = [self.pool.allocate() for _ in blocks[full:]]
        except CapacityError:
            self.pool.free(blocks[:full])
            raise
        for source, target in zip(blocks[full:], copied, strict=True):
            self.pool.copy(source, target)
        self.num_blocks = len(blocks)
        self.block_table[: self.num_blocks] = [*blocks[:full], *copied]
        self.num_tokens = num_tokens

    def exchange(self, place: int, block: int) -> None:
        """Hold `block`, which others hold too and whose bytes are equal, as block `place`."""
        own = int(self.block_table[place])
        if own != block:
            self.pool.share([block])
            self.pool.free([own])
            self.block_table[place] = block

    def snapshot(self, *, since: int) -> SelectorSnapshot | None:
        """What selectors keep of the tokens so far, beyond a snapshot at `since` tokens.

        None if this sequence keeps nothing of the kind.
        """
        if self.index_layout is None and self.importance is None:
            return None
        index, first = None, 0
        if self.index is not None and self.index_layout is not None:
            # The last group of the earlier snapshot may have been filled further since.
            first = max(0, self.index_layout.num_groups(since) - 1)
            index = self.index[:, first : self.index_layout.num_groups(self.num_tokens)].copy()
        importance = self.importance
        return SelectorSnapshot(
            since=since,
            num_tokens=self.num_tokens,
            first_group=first,
            index=index,
            importance=None if importance is None else importance[:, : self.num_tokens].copy(),
        )

    def restore(self, snapshots: Sequence[SelectorSnapshot]) -> None:
        """Take over what selectors kept of the adopted tokens; each snapshot goes on from the
        one before, and the last one ends at `num_tokens`.
        """
        for snapshot in snapshots:
            if self.index is not None and snapshot.index is not None:
                end = snapshot.first_group + snapshot.index.shape[1]
                self.index[:, snapshot.first_group : end] = snapshot.index
        last = snapshots[-1].importance if snapshots else None
        if self.importance is not None and last is not None:
            self.importance[:, : last.shape[1]] = last

    def truncate(self, num_tokens: int) -> None:
        """Forget every token from position `num_tokens` on, their pages and their importance."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ConfigError(
                f"[KVCache.truncate] num_tokens: expected 0 to {self.num_tokens}, got {num_tokens}"
            )
        keep = blocks_for(num_tokens)
        self.pool.free(int(block) for block in self.block_table[keep : self.num_blocks])
        self.num_blocks = keep
        self.num_tokens = num_tokens
        if self.importance is not None:
            self.importance[:, num_tokens:] = 0

    def release(self) -> None:
        """Give every page back; harmless when done twice."""
        self.truncate(0)


def blocks_for(num_tokens: int) -> int:
    """Blocks of 32 that `num_tokens` tokens occupy, the last one perhaps in part."""
    return -(-num_tokens // BLOCK_SIZE)
