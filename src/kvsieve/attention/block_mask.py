"""`BlockMask`: which blocks of keys each tile of queries reads, in CSR form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvsieve.attention.csr import check_rows, frozen_integers, row_of_entry
from kvsieve.attention.inputs import check_positive, described
from kvsieve.errors import ConfigError, ShapeError
from kvsieve.kernels.backend import BlockLists
from kvsieve.types import BLOCK_SIZE, I32, I64, Bool

_DRAWN_TILES = 8
_DRAWN_BLOCKS = 64


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlockMask:
    """Blocks read by each (head, tile), with the exact causal mask inside every block.

    Positions are absolute: block ``b`` and tile ``b`` both hold positions
    ``[block_size * b, block_size * (b + 1))``. Queries end at position ``kv_len``, so the
    mask's tile 0 is block ``first_tile`` and may be cut at its start, as the last tile and the
    last block may be at their end. A query reads, in every listed block, the tokens at its own
    position and before: the block on the diagonal keeps its triangle.

    Parameters
    ----------
    indptr : integer array ``[num_kv_heads * lists_per_kv_head * num_tiles + 1]``
        ``indices[indptr[r]:indptr[r + 1]]`` are the blocks of row ``r = head * num_tiles + tile``.
        Kept as a read-only int64 copy.
    indices : integer array
        Blocks, ascending and unique within a row, none later than the row's own tile, at least
        one per row. Kept as a read-only int32 copy.
    num_kv_heads, num_tiles, q_len, kv_len, block_size : int
        Sizes; ``num_tiles`` must be the number of blocks that the queries' positions touch.
    lists_per_kv_head : int
        1 (default): the query heads that share a KV head also share its list. Otherwise the
        size of that group: query head ``h`` has its own list, in rows
        ``h * num_tiles .. h * num_tiles + num_tiles - 1``.

    Raises
    ------
    ShapeError
        An array has the wrong dtype or length, or ``num_tiles`` does not follow from the sizes.
    ConfigError
        A row is empty, unsorted, repeats a block, or reads a block of the future.

    Notes
    -----
    docs/selection.md, section 6. A visible block does not mean that every token in it is visible.
    """

    indptr: I64
    indices: I32
    num_kv_heads: int
    num_tiles: int
    q_len: int
    kv_len: int
    block_size: int = BLOCK_SIZE
    lists_per_kv_head: int = 1

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "q_len", "kv_len", "block_size", "lists_per_kv_head"):
            check_positive("BlockMask", name, getattr(self, name))
        if self.q_len > self.kv_len:
            raise ShapeError(
                f"[BlockMask] q_len: expected at most kv_len={self.kv_len}, got {self.q_len}"
            )
        expected = self.num_blocks - self.first_tile
        if self.num_tiles != expected:
            raise ShapeError(
                f"[BlockMask] num_tiles: expected {expected} for {self.q_len} queries that end at "
                f"position {self.kv_len}, got {self.num_tiles!r}"
            )
        object.__setattr__(self, "indptr", frozen_integers("indptr", self.indptr, np.int64))
        object.__setattr__(self, "indices", frozen_integers("indices", self.indices, np.int32))
        check_rows(
            self.indptr,
            self.indices,
            num_heads=self.num_heads,
            num_tiles=self.num_tiles,
            first_tile=self.first_tile,
        )

    # -- sizes ---------------------------------------------------------------------------------

    @property
    def num_heads(self) -> int:
        """Lists per tile: KV heads, or query heads if each has its own list."""
        return self.num_kv_heads * self.lists_per_kv_head

    @property
    def num_blocks(self) -> int:
        """Blocks of keys, the last one possibly partial."""
        return -(-self.kv_len // self.block_size)

    @property
    def first_tile(self) -> int:
        """The block that holds the first query."""
        return (self.kv_len - self.q_len) // self.block_size

    @property
    def tile_rows(self) -> I64:
        """Queries in each tile, ``i64 [num_tiles]``."""
        edges = np.arange(self.first_tile, self.num_blocks + 1) * self.block_size
        return np.diff(edges.clip(self.kv_len - self.q_len, self.kv_len)).astype(np.int64)

    # -- what it reads -------------------------------------------------------------------------

    @property
    def pairs_attended(self) -> int:
        """(query, block) pairs read: per KV head, the union over its query heads."""
        grid = self.to_blocks().reshape(
            self.num_kv_heads, self.lists_per_kv_head, self.num_tiles, self.num_blocks
        )
        return int((grid.any(axis=1).sum(axis=-1) * self.tile_rows).sum())

    @property
    def pairs_causal(self) -> int:
        """(query, block) pairs that exact attention reads: blocks 0 to the query's own."""
        own = np.arange(self.first_tile, self.num_blocks) + 1
        return int((own * self.tile_rows).sum()) * self.num_kv_heads

    @property
    def density(self) -> float:
        """`pairs_attended` / `pairs_causal`: 1.0 reads everything, exactly as without a mask."""
        return self.pairs_attended / self.pairs_causal

    def blocks(self, head: int, tile: int = 0) -> I32:
        """The blocks read by one head's tile, ascending; `tile` counts from `first_tile`."""
        if not (0 <= head < self.num_heads and 0 <= tile < self.num_tiles):
            raise ConfigError(
                f"[BlockMask.blocks] head, tile: expected below {self.num_heads} and "
                f"{self.num_tiles}, got {head} and {tile}"
            )
        row = head * self.num_tiles + tile
        return self.indices[self.indptr[row] : self.indptr[row + 1]]

    # -- other forms ---------------------------------------------------------------------------

    def to_blocks(self) -> Bool:
        """The mask as a grid, ``bool [num_heads, num_tiles, num_blocks]``."""
        grid = np.zeros((self.num_heads * self.num_tiles, self.num_blocks), dtype=np.bool_)
        grid[row_of_entry(self.indptr), self.indices] = True
        return grid.reshape(self.num_heads, self.num_tiles, self.num_blocks)

    def to_dense(self) -> Bool:
        """The mask on tokens, ``bool [num_heads, Tq, Tkv]``, causal triangle included."""
        positions = np.arange(self.kv_len - self.q_len, self.kv_len)
        tokens = np.arange(self.kv_len)
        read = self.to_blocks()[:, positions // self.block_size - self.first_tile]
        causal = tokens[None, :] <= positions[:, None]
        return np.asarray(read[:, :, tokens // self.block_size] & causal)

    def to_block_lists(self) -> BlockLists:
        """The same rows as the kernels take them; only for blocks of 32."""
        if self.block_size != BLOCK_SIZE:
            raise ConfigError(
                f"[BlockMask.to_block_lists] block_size: expected {BLOCK_SIZE}, "
                f"got {self.block_size}"
            )
        return BlockLists(
            num_heads=self.num_heads,
            num_tiles=self.num_tiles,
            indptr=self.indptr,
            indices=self.indices,
        )

    # -- construction --------------------------------------------------------------------------

    @classmethod
    def from_lists(
        cls,
        lists: Sequence[Sequence[Iterable[int]]],
        *,
        q_len: int,
        kv_len: int,
        block_size: int = BLOCK_SIZE,
        lists_per_kv_head: int = 1,
    ) -> "BlockMask":
        """From ``lists[head][tile]``, any order: sorted, and a block named twice is read once."""
        tiles = {len(per_head) for per_head in lists}
        if len(tiles) != 1:
            raise ShapeError(
                f"[BlockMask.from_lists] lists: expected the same number of tiles for at least "
                f"one head, got {sorted(tiles)}"
            )
        rows = [sorted(set(row)) for per_head in lists for row in per_head]
        return cls(
            indptr=np.cumsum([0, *map(len, rows)], dtype=np.int64),
            indices=np.array([block for row in rows for block in row], dtype=np.int32),
            num_kv_heads=_kv_heads("from_lists", len(lists), lists_per_kv_head),
            num_tiles=tiles.pop(),
            q_len=q_len,
            kv_len=kv_len,
            block_size=block_size,
            lists_per_kv_head=lists_per_kv_head,
        )

    @classmethod
    def from_blocks(
        cls,
        grid: Bool,
        *,
        q_len: int,
        kv_len: int,
        block_size: int = BLOCK_SIZE,
        lists_per_kv_head: int = 1,
    ) -> "BlockMask":
        """From a grid ``bool [num_heads, num_tiles, num_blocks]``, the inverse of `to_blocks`."""
        check_positive("BlockMask", "block_size", block_size)
        num_blocks = -(-kv_len // block_size)
        if _not_bool(grid, 3) or grid.shape[2] != num_blocks:
            raise ShapeError(
                f"[BlockMask.from_blocks] grid: expected bool [heads, tiles, {num_blocks}], "
                f"got {described(grid)}"
            )
        counts = grid.sum(axis=-1).reshape(-1)
        return cls(
            indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            indices=np.nonzero(grid)[2].astype(np.int32),
            num_kv_heads=_kv_heads("from_blocks", grid.shape[0], lists_per_kv_head),
            num_tiles=grid.shape[1],
            q_len=q_len,
            kv_len=kv_len,
            block_size=block_size,
            lists_per_kv_head=lists_per_kv_head,
        )

    @classmethod
    def from_dense(
        cls, mask: Bool, *, block_size: int = BLOCK_SIZE, lists_per_kv_head: int = 1
    ) -> "BlockMask":
        """The blocks that hold at least one token of ``bool [Tq, Tkv]`` or ``[heads, Tq, Tkv]``.

        Reading by blocks reads more than the token mask asked for: `to_dense` gives back the
        whole visible part of each block. A mask that reads the future is a ConfigError.
        """
        if _not_bool(mask, 2) and _not_bool(mask, 3):
            raise ShapeError(
                f"[BlockMask.from_dense] mask: expected bool [Tq, Tkv] or [heads, Tq, Tkv], "
                f"got {described(mask)}"
            )
        check_positive("BlockMask", "block_size", block_size)
        heads = mask[None] if mask.ndim == 2 else mask
        _, q_len, kv_len = heads.shape
        if 0 in heads.shape or q_len > kv_len:
            raise ShapeError(
                f"[BlockMask.from_dense] mask: expected 1 <= Tq <= Tkv, got {mask.shape}"
            )
        positions = np.arange(kv_len - q_len, kv_len)
        if (heads & (np.arange(kv_len)[None, :] > positions[:, None])).any():
            raise ConfigError(
                "[BlockMask.from_dense] mask: expected a causal mask, got one that reads tokens "
                "after the query"
            )
        by_block = np.logical_or.reduceat(heads, np.arange(0, kv_len, block_size), axis=2)
        tile_starts = np.flatnonzero(np.diff(positions // block_size, prepend=-1))
        return cls.from_blocks(
            np.logical_or.reduceat(by_block, tile_starts, axis=1),
            q_len=q_len,
            kv_len=kv_len,
            block_size=block_size,
            lists_per_kv_head=lists_per_kv_head,
        )

    @classmethod
    def full(
        cls, *, q_len: int, kv_len: int, num_kv_heads: int = 1, block_size: int = BLOCK_SIZE
    ) -> "BlockMask":
        """Every causal block: what exact attention reads."""
        check_positive("BlockMask", "block_size", block_size)
        num_blocks = -(-kv_len // block_size)
        tiles = np.arange((kv_len - q_len) // block_size, num_blocks)
        grid = np.arange(num_blocks)[None, :] <= tiles[:, None]
        return cls.from_blocks(
            np.repeat(grid[None], num_kv_heads, axis=0),
            q_len=q_len,
            kv_len=kv_len,
            block_size=block_size,
        )

    # -- set operations ------------------------------------------------------------------------

    def __or__(self, other: "BlockMask") -> "BlockMask":
        """Blocks that either mask reads, each once."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._combined(other, np.logical_or)

    def __and__(self, other: "BlockMask") -> "BlockMask":
        """Blocks that both masks read; a ConfigError if a row is left with none."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._combined(other, np.logical_and)

    def __eq__(self, other: object) -> bool:
        """Whether both masks have the same sizes and read the same blocks."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._sizes() == other._sizes() and bool(
            np.array_equal(self.indptr, other.indptr)
            and np.array_equal(self.indices, other.indices)
        )

    def __hash__(self) -> int:
        return hash((self._sizes(), self.indptr.tobytes(), self.indices.tobytes()))

    def __repr__(self) -> str:
        per = "query" if self.lists_per_kv_head > 1 else "KV"
        head = (
            f"BlockMask({self.num_heads} {per} heads x {self.num_tiles} tiles, "
            f"{len(self.indices)} blocks of {self.block_size} tokens listed, "
            f"q_len={self.q_len}, kv_len={self.kv_len}, density={self.density:.3f})"
        )
        if self.num_blocks > _DRAWN_BLOCKS:
            return head
        grid = self.to_blocks()[0, -_DRAWN_TILES:]
        first = self.num_blocks - len(grid)
        lines = [
            f"  tile {tile:>2} |{''.join('#' if read else '.' for read in row[: tile + 1])}"
            for tile, row in enumerate(grid, start=first)
        ]
        return "\n".join([head, "  head 0 (# block read, . block left out):", *lines])

    # -- inside --------------------------------------------------------------------------------

    def _sizes(self) -> tuple[int, ...]:
        return (
            self.num_kv_heads,
            self.lists_per_kv_head,
            self.q_len,
            self.kv_len,
            self.block_size,
        )

    def _combined(self, other: "BlockMask", operation: np.ufunc) -> "BlockMask":
        mine = (self.num_kv_heads, self.q_len, self.kv_len, self.block_size)
        theirs = (other.num_kv_heads, other.q_len, other.kv_len, other.block_size)
        lists = max(self.lists_per_kv_head, other.lists_per_kv_head)
        if mine != theirs or {self.lists_per_kv_head, other.lists_per_kv_head} - {1, lists}:
            raise ShapeError(
                f"[BlockMask] other: expected (num_kv_heads, q_len, kv_len, block_size) = {mine} "
                f"and as many lists per KV head (or one), got {theirs}"
            )
        left, right = (
            np.repeat(mask.to_blocks(), lists // mask.lists_per_kv_head, axis=0)
            for mask in (self, other)
        )
        return BlockMask.from_blocks(
            operation(left, right),
            q_len=self.q_len,
            kv_len=self.kv_len,
            block_size=self.block_size,
            lists_per_kv_head=lists,
        )


def _not_bool(array: object, rank: int) -> bool:
    return not (isinstance(array, np.ndarray) and array.dtype == np.bool_ and array.ndim == rank)


def _kv_heads(function: str, num_heads: int, lists_per_kv_head: int) -> int:
    check_positive("BlockMask", "lists_per_kv_head", lists_per_kv_head)
    if num_heads % lists_per_kv_head:
        raise ShapeError(
            f"[BlockMask.{function}] lists_per_kv_head: expected a divisor of the {num_heads} "
            f"heads listed, got {lists_per_kv_head}"
        )
    return num_heads // lists_per_kv_head
