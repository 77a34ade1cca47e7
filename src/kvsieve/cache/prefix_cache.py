"""Blocks of past sequences, found again by what was in them and before them.

A block's key is a hash of its tokens, of how they were computed (its *origin*) and of the key of
the block before it, so that one look-up per block finds the longest known beginning of a prompt.
A hash only finds: tokens, origin and predecessor are compared before anything is reused.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache
from kvsieve.cache.snapshot import SelectorSnapshot
from kvsieve.errors import ConfigError
from kvsieve.types import BLOCK_SIZE, I32

EXACT = b"exact"
"""Origin of a block whose rows all read every block before them. Such rows do not depend on each
other's tile, so a part of the block may be reused, and generated rows equal prompt rows."""

_ROOT = b""
_MOST_SIBLINGS = 32
"""Blocks with one predecessor that are compared for a common beginning, latest first."""


@dataclass(kw_only=True)
class Entry:
    """One cached block, full or (exact ones only) open. `tokens` are the bytes of its i32 ids."""

    key: bytes
    parent: bytes
    origin: bytes
    tokens: bytes
    block: int
    snapshots: dict[str, SelectorSnapshot] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of the block."""
        return len(self.tokens) // 4

    def num_bytes(self, block_bytes: int) -> int:
        """What keeping the entry costs."""
        return block_bytes + sum(one.num_bytes for one in self.snapshots.values())


@dataclass(frozen=True, kw_only=True)
class Match:
    """The longest known beginning of a prompt: the entries that hold its `num_tokens` tokens.

    `snapshots` are what the selectors need to go on from there.
    """

    num_tokens: int
    entries: tuple[Entry, ...]
    snapshots: tuple[SelectorSnapshot, ...] = ()

    @property
    def blocks(self) -> list[int]:
        """Pages, in order."""
        return [entry.block for entry in self.entries]


class PrefixCache:
    """Keeps blocks of `pool` beyond the life of their sequences, up to `max_bytes`.

    The least recently used go first, and always from the end of a chain. Blocks that a running
    sequence holds are never given up. One thread at a time.
    """

    def __init__(self, pool: BlockPool, *, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ConfigError(f"[PrefixCache] max_bytes: expected at least 0, got {max_bytes}")
        self.pool = pool
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._children: dict[bytes, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # -- looking up ----------------------------------------------------------------------------
    def match(
        self,
        ids: I32,
        origins: Sequence[bytes],
        *,
        limit: int,
        snapshot_kind: str | None = None,
    ) -> Match:
        """The longest beginning of `ids` that is here, of at most `limit` tokens.

        Parameters
        ----------
        ids : i32 ``[T]``
        origins : how each block of `ids` would be computed now
        limit : tokens; at least one less than the prompt has, because its last row has to run
        snapshot_kind : what the selectors need; only positions with such a snapshot count then

        Beyond the full blocks, a part of one exact block may match; ties go to the latest. What
        matches becomes the most recently used.
        """
        entries = self.chain(ids[:limit], origins)
        if snapshot_kind is not None:
            return self._with_snapshots(entries, snapshot_kind)
        num_tokens = len(entries) * BLOCK_SIZE
        if num_tokens < limit and origins[len(entries)] == EXACT:
            parent = entries[-1].key if entries else _ROOT
            part, common = self._longest_part(parent, ids[num_tokens:limit])
            if part is not None:
                entries, num_tokens = [*entries, part], num_tokens + common
        self._touch(entries)
        return Match(num_tokens=num_tokens, entries=tuple(entries))

    def chain(self, ids: I32, origins: Sequence[bytes]) -> list[Entry]:
        """Entries of the full blocks that `ids` begins with."""
        found: list[Entry] = []
        parent = _ROOT
        for place in range(len(ids) // BLOCK_SIZE):
            tokens = _token_bytes(ids, place)
            entry = self._find(parent, origins[place], tokens)
            if entry is None:
                break
            found.append(entry)
            parent = entry.key
        return found

    def _find(self, parent: bytes, origin: bytes, tokens: bytes) -> Entry | None:
        entry = self._entries.get(_key(parent, origin, tokens))
        if entry is None or (entry.parent, entry.origin, entry.tokens) != (parent, origin, tokens):
            return None
        return entry

    def _longest_part(self, parent: bytes, wanted: I32) -> tuple[Entry | None, int]:
        best, longest = None, 0
        for key in list(reversed(self._children.get(parent, {})))[:_MOST_SIBLINGS]:
            entry = self._entries[key]
            if entry.origin != EXACT:
                continue
            have = np.frombuffer(entry.tokens, np.int32)[: len(wanted)]
            differs = np.flatnonzero(have != wanted[: len(have)])
            common = int(differs[0]) if differs.size else len(have)
            if common > longest:
                best, longest = entry, common
        return best, longest

    def _with_snapshots(self, entries: list[Entry], kind: str) -> Match:
        longest = 0
        usable: dict[int, tuple[SelectorSnapshot, ...]] = {0: ()}
        for place, entry in enumerate(entries, start=1):
            snapshot = entry.snapshots.get(kind)
            if snapshot is not None and snapshot.since in usable:
                longest = place * BLOCK_SIZE
                usable[longest] = (*usable[snapshot.since], snapshot)
        kept = entries[: longest // BLOCK_SIZE]
        self._touch(kept)
        return Match(num_tokens=longest, entries=tuple(kept), snapshots=usable[longest])

    # -- keeping -------------------------------------------------------------------------------
    def insert(
        self,
        cache: KVCache,
        ids: I32,
        origins: Sequence[bytes],
        *,
        after: Sequence[Entry] = (),
    ) -> list[Entry]:
        """Keep the blocks of `cache` that hold `ids`, and return their entries.

        A full block that is here already is not kept twice: the sequence goes on with the one
        that is here, whose bytes are the same. An open last block is kept only of a sequence that
        writes no more.

        ids : i32 ``[T]``, all of them through the model
        origins : of each block; an open last block must be ``EXACT``
        after : entries of the first blocks, as an earlier call returned them
        """
        kept = list(after)
        parent = kept[-1].key if kept else _ROOT
        for place in range(len(kept), -(-len(ids) // BLOCK_SIZE)):
            tokens = _token_bytes(ids, place)
            entry = self._find(parent, origins[place], tokens)
            if entry is None and len(tokens) < 4 * BLOCK_SIZE:
                entry = self._longer(parent, tokens)
            if entry is None:
                entry = self._add(parent, origins[place], tokens, int(cache.block_table[place]))
                if entry is None:
                    break
            elif len(tokens) == 4 * BLOCK_SIZE:
                cache.exchange(place, entry.block)
            kept.append(entry)
            parent = entry.key
        self._touch(kept)
        self._shrink()
        return kept

    def add_block(
        self, parent: Entry | None, *, ids: I32, origin: bytes, block: int
    ) -> Entry | None:
        """Keep one block after `parent`; None if another one has its key."""
        before = _ROOT if parent is None else parent.key
        tokens = np.ascontiguousarray(ids, np.int32).tobytes()
        return self._find(before, origin, tokens) or self._add(before, origin, tokens, block)

    def settle(self, entries: Sequence[Entry] = ()) -> None:
        """Count `entries` as used now, and keep to the budget.

        To be called when a sequence has given its blocks back: until then they could not go.
        """
        self._touch(entries)
        self._shrink()

    def add_snapshot(self, entry: Entry, kind: str, snapshot: SelectorSnapshot) -> None:
        """Keep selector data with the last block that it covers; the first one stays.

        It counts when the budget is next looked at.
        """
        if entry.key in self._entries and kind not in entry.snapshots:
            entry.snapshots[kind] = snapshot
            self.num_bytes += snapshot.num_bytes

    def _add(self, parent: bytes, origin: bytes, tokens: bytes, block: int) -> Entry | None:
        key = _key(parent, origin, tokens)
        if key in self._entries:  # two contents with one hash: the first one stays
            return None
        self.pool.share([block])
        entry = Entry(key=key, parent=parent, origin=origin, tokens=tokens, block=block)
        self._drop_beginnings(entry)
        self._entries[key] = entry
        self._children.setdefault(parent, {})[key] = None
        self.num_bytes += self.pool.block_bytes
        return entry

    def _longer(self, parent: bytes, tokens: bytes) -> Entry | None:
        """An exact block that goes on from an open one with `tokens`."""
        for key in self._children.get(parent, {}):
            entry = self._entries[key]
            if entry.origin == EXACT and entry.tokens.startswith(tokens):
                return entry
        return None

    def _drop_beginnings(self, entry: Entry) -> None:
        """Give up open blocks that `entry` goes on from: whatever they match, it matches too."""
        if entry.origin != EXACT:
            return
        for key in list(self._children.get(entry.parent, {})):
            other = self._entries[key]
            if (
                other.origin == EXACT
                and other.num_tokens < BLOCK_SIZE
                and len(other.tokens) < len(entry.tokens)
                and entry.tokens.startswith(other.tokens)
            ):
                self._remove(other)

    # -- giving up -----------------------------------------------------------------------------
    def make_room(self, num_blocks: int) -> None:
        """Give up entries until `num_blocks` blocks are free, or no more can be given up."""
        while self.pool.num_free < num_blocks and self._evict_one():
            pass

    def forget(self, entries: Iterable[Entry]) -> None:
        """Give up these, last ones first, as far as nobody holds them and nothing follows."""
        for entry in reversed(list(entries)):
            if entry.key in self._entries and self._can_go(entry):
                self._remove(entry)

    def alive(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those of a chain that are still here, up to the first that is not."""
        found: list[Entry] = []
        for entry in entries:
            if self._entries.get(entry.key) is not entry:
                break
            found.append(entry)
        return found

    def clear(self) -> None:
        """Give up everything that no running sequence holds."""
        while self._evict_one():
            pass

    def _shrink(self) -> None:
        while self.num_bytes > self.max_bytes and self._evict_one():
            pass

    def _evict_one(self) -> bool:
        for entry in self._entries.values():
            if self._can_go(entry):
                self._remove(entry)
                return True
        return False

    def _can_go(self, entry: Entry) -> bool:
        return not self._children.get(entry.key) and self.pool.holders(entry.block) == 1

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        siblings = self._children[entry.parent]
        del siblings[entry.key]
        if not siblings:
            del self._children[entry.parent]
        self.num_bytes -= entry.num_bytes(self.pool.block_bytes)
        self.pool.free([entry.block])

    def _touch(self, entries: Sequence[Entry]) -> None:
        """Most recently used; the first block of a chain last, so that its end goes before it."""
        for entry in reversed(entries):
            if entry.key in self._entries:
                self._entries.move_to_end(entry.key)


def _key(parent: bytes, origin: bytes, tokens: bytes) -> bytes:
    # Both ends are fixed or separated by their lengths: no two triples give the same bytes.
    return blake2b(
        b"%d,%d;" % (len(parent), len(origin)) + parent + origin + tokens, digest_size=16
    ).digest()


def _token_bytes(ids: I32, place: int) -> bytes:
    return ids[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE].tobytes()
