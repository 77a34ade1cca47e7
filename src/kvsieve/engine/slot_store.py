"""What slots keep, to files and back."""

from dataclasses import dataclass
from os import PathLike

import numpy as np

from kvsieve.cache.kv_cache import blocks_for
from kvsieve.cache.prefix_cache import Entry
from kvsieve.cache.slot_file import SavedBlocks, read_slot, write_slot
from kvsieve.cache.snapshot import SelectorSnapshot
from kvsieve.engine.batcher import Batcher
from kvsieve.engine.slots import Slot
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.types import BLOCK_SIZE, I32


@dataclass(frozen=True, kw_only=True)
class PinnedBlocks:
    """Blocks of a slot that stay as they are until they are unpinned."""

    ids: I32
    blocks: list[int]
    origins: list[bytes]
    snapshots: dict[tuple[int, str], SelectorSnapshot]

    @property
    def num_tokens(self) -> int:
        """Tokens in the blocks."""
        return len(self.ids)


class SlotStore:
    """Saves, restores and erases slots.

    `pin`, `unpin`, `put` and `erase` run on the engine's thread; `write` and `read`, which take
    long, on the caller's.
    """

    def __init__(self, batcher: Batcher, *, fingerprint: str) -> None:
        self._batcher = batcher
        self._fingerprint = fingerprint

    def pin(self, place: int) -> PinnedBlocks:
        """Hold what an idle slot keeps. ConfigError if that is nothing."""
        slot = self._idle("save_slot", place)
        entries = self._batcher.prefix.alive(slot.kept)
        ids = slot.kept_ids[: len(entries) * BLOCK_SIZE]
        if not len(ids):
            raise ConfigError(
                f"[Service.save_slot] slot: expected one that keeps a sequence, got {place}, "
                "which keeps none"
            )
        self._batcher.pool.share([entry.block for entry in entries])
        return PinnedBlocks(
            ids=ids,
            blocks=[entry.block for entry in entries],
            origins=[entry.origin for entry in entries],
            snapshots=_snapshots(entries),
        )

    def unpin(self, pinned: PinnedBlocks) -> None:
        """Hold them no more."""
        self._batcher.pool.free(pinned.blocks)

    def write(self, pinned: PinnedBlocks, path: str | PathLike[str]) -> int:
        """Write pinned blocks to a file; returns its size."""
        pool = self._batcher.pool
        saved = SavedBlocks(
            ids=pinned.ids,
            origins=pinned.origins,
            pages=np.ascontiguousarray(pool.pages[:, pinned.blocks].swapaxes(0, 1)),
            snapshots=pinned.snapshots,
        )
        return write_slot(path, saved, pool=pool, fingerprint=self._fingerprint)

    def read(self, path: str | PathLike[str]) -> tuple[SavedBlocks, int]:
        """Read and check a file; returns its size too."""
        return read_slot(
            path,
            pool=self._batcher.pool,
            fingerprint=self._fingerprint,
            max_bytes=self._batcher.prefix.max_bytes,
        )

    def put(self, place: int, saved: SavedBlocks) -> int:
        """Make what a file held part of the prefix cache, and of an idle slot; its tokens."""
        slot = self._idle("restore_slot", place)
        pool, prefix = self._batcher.pool, self._batcher.prefix
        needed = blocks_for(len(saved.ids))
        prefix.make_room(needed)
        if pool.num_free < needed:
            raise CapacityError(
                f"[Service.restore_slot] expected {needed} free blocks, got {pool.num_free}: "
                "running requests hold the others"
            )
        entries: list[Entry] = []
        for number in range(needed):
            block = pool.allocate()
            pool.pages[:, block] = saved.pages[number]
            entry = prefix.add_block(
                entries[-1] if entries else None,
                ids=saved.ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE],
                origin=saved.origins[number],
                block=block,
            )
            pool.free([block])  # the prefix cache holds it now, or has an equal one
            if entry is None:
                break
            entries.append(entry)
        for (number, kind), snapshot in saved.snapshots.items():
            if number < len(entries):
                prefix.add_snapshot(entries[number], kind, snapshot)
        prefix.settle(entries)
        slot.erase()
        slot.keep(saved.ids[: len(entries) * BLOCK_SIZE], entries)
        return len(slot.kept_ids)

    def erase(self, place: int) -> int:
        """Forget what an idle slot keeps, as far as nothing else needs it; its tokens."""
        slot = self._idle("erase_slot", place)
        num_tokens = len(slot.kept_ids)
        self._batcher.prefix.forget(slot.kept)
        slot.erase()
        return num_tokens

    def _idle(self, function: str, place: int) -> Slot:
        slot = self._batcher.slots[place]
        if slot.job is not None:
            raise ConfigError(f"[Service.{function}] slot: expected an idle one, got {place}, busy")
        return slot


def _snapshots(entries: list[Entry]) -> dict[tuple[int, str], SelectorSnapshot]:
    """What selectors kept, by number of the block and kind."""
    found: dict[tuple[int, str], SelectorSnapshot] = {}
    for number, entry in enumerate(entries):
        for kind, snapshot in entry.snapshots.items():
            found[number, kind] = snapshot
    return found
