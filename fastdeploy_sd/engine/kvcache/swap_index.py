"""Which slot of the swap space holds which block's content, and which one to overwrite next. Knows no bytes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, PrefixCache


@dataclass(slots=True, eq=False)
class _Entry:
    """A slot's content; copies that have not ended pin it, and only they keep one that is dropped."""

    slot: int
    content: CachedBlock
    last_used: int
    num_pins: int = 0
    is_ready: bool = False
    is_dropped: bool = False


class SwapIndex:
    """Maps the hash of a prefix that ends at a block border to the slot with its last block, as `PrefixCache` does.

    A slot is in exactly one state:

        free      no content that may be found
        storing   its bytes are on their way: not found, pinned
        ready     found; pinned while it is read
        dropped   not found any more, and still pinned

    Full slots are overwritten least recently used first, but never before those that hold what follows them: without
    its parent a block is never asked for. Using a block uses those before it.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack; slot 0 is used first
        self._by_hash: dict[bytes, _Entry] = {}
        self._by_slot: dict[int, _Entry] = {}
        self._num_children = Counter[bytes]()
        self._evictable: list[tuple[int, bytes]] = []  # a heap; an entry is valid while its time is that of last use
        self._clock = 0

    @property
    def num_used_slots(self) -> int:
        return self.num_slots - len(self._free)

    def has(self, block_hash: bytes) -> bool:
        """Whether a slot holds this content, or will."""
        return block_hash in self._by_hash

    def restore(self, contents: Iterable[tuple[int, CachedBlock]]) -> None:
        """Take over what free slots hold, the least recently used first. Of two with the same content the later stays.

        A record read from it must be verified: contents whose hash is not that of their tokens are left out.
        """
        assert not self._by_slot, "restore comes first"
        for slot, content in contents:
            if PrefixCache.chain(content.parent, content.tokens) == content.hash:
                self.drop(content.hash)
                self._insert(slot, content).is_ready = True
                self._offer(self._by_slot[slot])
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in self._by_slot]

    def reserve(self, content: CachedBlock) -> tuple[int, bool] | None:
        """Choose a slot for a content and pin it until `unpin`; `set_ready` says when the bytes are there.

        Returns the slot, and whether something was evicted from it; None if the content is known, or no slot is left.
        """
        if content.hash in self._by_hash:
            return None
        is_full = not self._free
        if is_full and not self._evict():
            return None
        slot = self._free.pop()
        self._insert(slot, content).num_pins = 1
        return slot, is_full

    def set_ready(self, slot: int) -> None:
        """Let the content of a pinned slot be found, unless it was dropped meanwhile."""
        self._by_slot[slot].is_ready = not self._by_slot[slot].is_dropped

    def slot(self, content: CachedBlock) -> int | None:
        """Return the slot with exactly this content; None = there is none."""
        entry = self._by_hash.get(content.hash)
        return None if entry is None or not entry.is_ready or entry.content != content else entry.slot

    def pin(self, slot: int) -> None:
        """Keep a slot's content until `unpin`."""
        self._by_slot[slot].num_pins += 1

    def unpin(self, slot: int) -> None:
        """A copy from or to a slot has ended. One whose bytes never came is free again."""
        entry = self._by_slot[slot]
        assert entry.num_pins > 0, f"slot {slot} is not pinned"
        entry.num_pins -= 1
        if entry.num_pins == 0:
            if entry.is_ready:
                self._offer(entry)
            elif entry.is_dropped:
                self._forget_slot(entry)
            else:
                self.drop(entry.content.hash)

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Note that a chain was used, of which these are the first hashes; those without a slot are ignored."""
        self._clock += 1
        for block_hash in block_hashes:
            entry = self._by_hash.get(block_hash)
            if entry is not None:
                entry.last_used = self._clock
                self._offer(entry)

    def drop(self, block_hash: bytes) -> int | None:
        """Forget a content; returns its slot, free now unless it is pinned, or None if there was none."""
        entry = self._by_hash.pop(block_hash, None)
        if entry is None:
            return None
        entry.is_dropped, entry.is_ready = True, False
        parent = entry.content.parent
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._by_hash:
                self._offer(self._by_hash[parent])
        self._forget_slot(entry)
        return entry.slot

    def check_integrity(self) -> None:
        """Verify that every slot is in one state and everything that may be evicted is offered. O(slots); for tests."""
        assert sorted([*self._free, *self._by_slot]) == list(range(self.num_slots)), "a slot is lost or in two states"
        found = {entry.slot for entry in self._by_hash.values()}
        assert len(found) == len(self._by_hash), "two contents in one slot"
        children = Counter(entry.content.parent for entry in self._by_hash.values())
        assert children == self._num_children, "children miscounted"
        offered = set(self._evictable)
        for slot, entry in self._by_slot.items():
            assert entry.slot == slot, f"slot {slot} is known as {entry.slot}"
            assert (slot in found) != entry.is_dropped, f"slot {slot}: found and dropped, or neither"
            assert entry.is_ready or entry.num_pins, f"slot {slot}: neither ready nor on its way"
            assert not self._is_evictable(entry) or (entry.last_used, entry.content.hash) in offered, (
                f"slot {slot} lost"
            )

    def _insert(self, slot: int, content: CachedBlock) -> _Entry:
        self._clock += 1
        entry = _Entry(slot, content, self._clock)
        self._by_hash[content.hash] = self._by_slot[slot] = entry
        self._num_children[content.parent] += 1
        return entry

    def _forget_slot(self, entry: _Entry) -> None:
        if entry.num_pins == 0 and self._by_slot.pop(entry.slot, None) is not None:
            self._free.append(entry.slot)

    def _is_evictable(self, entry: _Entry) -> bool:
        return entry.is_ready and not entry.num_pins and entry.content.hash not in self._num_children

    def _offer(self, entry: _Entry) -> None:
        if not self._is_evictable(entry):
            return
        heapq.heappush(self._evictable, (entry.last_used, entry.content.hash))
        if len(self._evictable) > 4 * self.num_slots + 64:  # mostly outdated
            entries = [e for e in self._by_hash.values() if self._is_evictable(e)]
            self._evictable = [(e.last_used, e.content.hash) for e in entries]
            heapq.heapify(self._evictable)

    def _evict(self) -> bool:
        while self._evictable:
            last_used, block_hash = heapq.heappop(self._evictable)
            entry = self._by_hash.get(block_hash)
            if entry is not None and entry.last_used == last_used and self._is_evictable(entry):
                self.drop(block_hash)
                return True
        return False
