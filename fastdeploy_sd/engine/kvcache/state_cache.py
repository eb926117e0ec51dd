"""Snapshots of recurrent states, so that prompts can go on after a prefix: where they are taken, found, overwritten.

A state holds all tokens before it, so a prefix hit needs one of exactly its end, besides the KV blocks. Of a request
these ends get a snapshot, at block borders:

    prompt            [0 ....... I ....... 2I ... K ...... L . num_given)
    answer                                                           [..... B ..... 2B ..... latest]

    I, 2I ..    a few in equal distances, for prompts that leave this one early
    K           where KV blocks were found further than a snapshot was: what comes here a third time finds both
    L           the last border before the prompt's end, for the same prompt
    latest      the last border so far, for the next turn of a conversation; it replaces the one before

A prefill instance also takes the state before the prompt's last token, wherever that is: the instance that goes on with
the prompt gets it, in a place of its own that it reads once.

A place depends on the text alone, not on how many tokens a step runs or drafts. A step writes the ones that it reaches,
after drafts as well; one counts when all its tokens are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from fastdeploy_sd.engine.kvcache.block_pool import BlockPool
from fastdeploy_sd.engine.kvcache.block_table import BlockTable, PrefixMatch, RequestStates
from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, CacheListener, PrefixCache
from fastdeploy_sd.engine.kvcache.prefix_matcher import Find, PrefixMatcher, TokenIds
from fastdeploy_sd.types import LIVE_STATE, NO_STATE, StatePlan

# Tokens between snapshots inside a prompt, and how many of them it gets: beyond these the distance doubles.
_INTERVAL, _MOST_INTERVALS = 1024, 8


class StateCache:
    """Which prefix each snapshot holds. One that nothing uses is kept, and overwritten least recently used first.

    A snapshot is known by the chain hash of the block of the first KV group that ends where it does. Snapshots are
    taken while there is a place for them; no request waits for one, or is preempted.

    Attributes:
        hands_over: whether states go to other instances too.
    """

    def __init__(self, num_snapshots: int, prefixes: PrefixMatcher, block_size: int) -> None:
        """Make a cache without snapshots; `block_size`: of the first KV group."""
        self.hands_over, self._held = False, dict[str, int]()
        self._pool, self._contents = BlockPool(num_snapshots), PrefixCache()
        self._prefixes, self._block_size = prefixes, block_size
        self.listener: CacheListener | None = None  # is told of snapshots as KVCacheManager's is of blocks

    @property
    def num_snapshots(self) -> int:
        """Places for snapshots; constant."""
        return self._pool.num_blocks

    @property
    def num_used_snapshots(self) -> int:
        """Places with a snapshot that can be found, or that a request is about to write."""
        return self._pool.num_blocks - self._pool.num_free_blocks

    @property
    def num_publications(self) -> int:
        """Snapshots that could be found from then on."""
        return self._contents.num_inserted

    def match(self, table: BlockTable, token_ids: TokenIds, num_tokens: int) -> PrefixMatch:
        """Return the longest prefix of fewer than `num_tokens` tokens with cached blocks and a snapshot of its end."""
        return self.longest(table, token_ids, num_tokens, self._prefixes.cached)

    def longest(
        self,
        table: BlockTable,
        token_ids: TokenIds,
        num_tokens: int,
        find: Find,
        is_elsewhere: Callable[[bytes], bool] = lambda _: False,
    ) -> PrefixMatch:
        """Return the longest prefix whose blocks are found, with a snapshot of its end here, or elsewhere.

        `is_elsewhere`: whether that of the block with a hash is.
        """
        match = self._prefixes.longest(table, token_ids, num_tokens, find)
        num_kv_tokens = match.num_tokens
        while True:
            end, snapshot = self._latest(table, token_ids, match.num_tokens, is_elsewhere)
            if end == match.num_tokens:
                return replace(match, missing_hash=None, snapshot=snapshot, num_kv_tokens=num_kv_tokens)
            match = self._prefixes.longest(table, token_ids, end + 1, find)

    def begin(self, table: BlockTable, match: PrefixMatch, num_tokens: int) -> None:
        """Let a request with so many tokens begin where its match ends, whose snapshot stays until a step is over."""
        branch = match.num_kv_tokens if match.num_kv_tokens > match.num_tokens else 0
        table.states = RequestStates(match.snapshot, match.num_tokens, num_tokens, branch)
        if match.snapshot != NO_STATE:
            self._pool.share([match.snapshot])

    def plan(self, tables: Iterable[BlockTable], num_computed: Sequence[int], num_new: Sequence[int]) -> StatePlan:
        """Return where the rows of a step begin, and which snapshots they write; one not reached is written later."""
        size = self._prefixes.alignment
        initial, counts, ends, ids = list[int](), list[int](), list[int](), list[int]()
        for table, begin, count in zip(tables, num_computed, num_new, strict=True):
            own = table.states
            if begin // size < (begin + count) // size or begin < own.num_given - 1 <= begin + count:
                self._reserve(own, begin, begin + count)
            initial.append(own.source)
            counts.append(len(own.pending))
            ends += own.pending
            ids += own.pending.values()
        cu_snapshots = np.array([0, *accumulate(counts)], np.int32)
        return StatePlan(np.array(initial, np.int32), cu_snapshots, np.array(ends, np.int32), np.array(ids, np.int32))

    def publish(self, table: BlockTable, token_ids: TokenIds, num_computed_tokens: int) -> None:
        """Note that a step is over: snapshots up to the computed, committed tokens can be found.

        Comes after the blocks up to there were published.
        """
        own = table.states
        if own.source != LIVE_STATE:
            self._release_source(own)
            own.source = LIVE_STATE
        for end in [end for end in own.pending if end <= num_computed_tokens]:
            snapshot = own.pending.pop(end)
            if end % self._prefixes.alignment:  # for another instance only
                self._pool.release(snapshot, keep=False)
                continue
            content = self._describe(table, token_ids, end)
            is_new = self._contents.insert(snapshot, content)
            self._pool.release(snapshot, keep=is_new)
            if end >= own.num_given:
                self._forget(own.latest)
                own.latest = content.hash if is_new else b""
            elif is_new and self.listener is not None:
                self.listener.published(snapshot, content)

    def free(self, table: BlockTable, *, discard: bool) -> None:
        """Take back what a request has not published, or reads; `discard`: none may find its prefixes from now on."""
        own, table.states = table.states, RequestStates()
        if discard:
            self._discard(table.groups[0].hashes)
        elif self.listener is not None:
            # Copies are made of the last one only: most are replaced soon.
            latest = self._contents.block_of(own.latest)
            content = None if latest is None else self._contents.content(latest)
            if latest is not None and content is not None:
                self.listener.published(latest, content)
        for snapshot in own.pending.values():
            self._pool.release(snapshot, keep=False)
        self._release_arriving(own)
        self._release_source(own)

    def expect(self, table: BlockTable) -> int | None:
        """Return the place for a state that another instance sends; None = there is none."""
        if not self._pool.num_available_blocks:
            return None
        table.states.arriving = self._allocate()
        return table.states.arriving

    def expect_known(self, table: BlockTable, snapshot: int) -> None:
        """Have a request go on from a snapshot of the pool when its KV has come."""
        self._pool.share([snapshot])
        table.states.arriving = snapshot

    def take_arrival(self, table: BlockTable, *, has_come: bool, content: CachedBlock | None = None) -> None:
        """Let a request begin at the state that was expected, if that has come; `content`: let others find it too."""
        own = table.states
        if has_come:
            self._release_source(own)
            own.source, own.arriving = own.arriving, NO_STATE
            if content is not None and own.source not in self._contents:
                self._contents.insert(own.source, content)
        self._release_arriving(own)

    def note_branch(self, table: BlockTable, match: PrefixMatch) -> None:
        """Plan a snapshot where a match of an admitted request found blocks further than a state."""
        if match.num_kv_tokens > match.num_tokens:
            table.states.branch = max(table.states.branch, match.num_kv_tokens)

    def hold(self, name: str, table: BlockTable, end: int) -> int | None:
        """Keep the snapshot of so many tokens until `release`, and return it; None = the request has none.

        For a step that reaches this end, or begins there.
        """
        own = table.states
        snapshot = own.source if own.begin == end else own.pending.get(end, NO_STATE)
        if snapshot < 0:
            return None
        self._pool.share([snapshot])
        self._held[name] = snapshot
        return snapshot

    def release(self, name: str) -> None:
        """Give back what was held under this name, if anything was."""
        snapshot = self._held.pop(name, None)
        if snapshot is not None:
            self._pool.release(snapshot, keep=snapshot in self._contents)

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Verify every place and hash. O(snapshots); for tests and the end of a server."""
        all_states = [table.states for table in tables]
        pending = [snapshot for own in all_states for snapshot in own.pending.values()]
        read = [place for own in all_states for place in (own.source, own.arriving) if place >= 0]
        self._pool.check_integrity([*pending, *read, *self._held.values()])
        self._contents.check_integrity({self._block_size})
        idle = {snapshot for snapshot in self._contents if self._pool.ref_count(snapshot) == 0}
        assert idle == set(self._pool.cached_block_ids), "snapshots are kept and unknown, or known and not kept"
        assert not any(snapshot in self._contents for snapshot in pending), "a snapshot was published too early"
        for own in all_states:
            assert list(own.pending) == sorted(own.pending), f"ends of snapshots out of order: {list(own.pending)}"

    def _latest(
        self, table: BlockTable, token_ids: TokenIds, num_tokens: int, is_elsewhere: Callable[[bytes], bool]
    ) -> tuple[int, int]:
        """Return the latest end, at `num_tokens` at most, that has a snapshot, and this; (0, NO_STATE) = none has.

        NO_STATE: the snapshot is elsewhere only.
        """
        hashes = table.groups[0].hashes
        for end in range(num_tokens, 0, -self._prefixes.alignment):
            if self._contents.has_hash(hashes[end // self._block_size - 1]):
                content = self._describe(table, token_ids, end)
                snapshot = self._contents.find(content.hash, content.parent, content.tokens)
                if snapshot is not None:
                    return end, snapshot
            if is_elsewhere(hashes[end // self._block_size - 1]):
                return end, NO_STATE
        return 0, NO_STATE

    def _reserve(self, own: RequestStates, begin: int, end: int) -> None:
        """Find places for the snapshots after `begin` tokens, up to `end`, while there are any."""
        for place in self._ends(own, begin, end):
            if place not in own.pending and self._pool.num_available_blocks:
                own.pending[place] = self._allocate()

    def _allocate(self) -> int:
        """Return a place of the pool, of which there is one, for a new snapshot."""
        [snapshot] = self._pool.allocate(1)
        if self.listener is not None:
            self.listener.lost([snapshot])
        self._contents.remove(snapshot)
        return snapshot

    def _discard(self, block_hashes: Sequence[bytes]) -> None:
        found = [self._contents.block_of(block_hash) for block_hash in block_hashes]
        if self.listener is not None:
            self.listener.lost([snapshot for snapshot in found if snapshot is not None])
            self.listener.discarded(block_hashes)
        for block_hash in block_hashes:
            self._forget(block_hash, is_used=True)

    def _ends(self, own: RequestStates, begin: int, end: int) -> list[int]:
        size = self._prefixes.alignment
        last = (own.num_given - 1) // size * size
        interval = -(-_INTERVAL // size) * size
        while own.num_given > _MOST_INTERVALS * interval:
            interval *= 2
        ends = {own.branch, last, *range((begin // interval + 1) * interval, min(end, last) + 1, interval)}
        ends.update(range(max(begin // size * size, last) + size, end + 1, size))
        if self.hands_over:
            ends.add(own.num_given - 1)
        return sorted(place for place in ends if begin < place <= end)

    def _describe(self, table: BlockTable, token_ids: TokenIds, end: int) -> CachedBlock:
        return self._prefixes.describe_block(table, token_ids, end // self._block_size - 1)

    def _forget(self, block_hash: bytes, *, is_used: bool = False) -> None:
        """Let a snapshot not be found any more, unless a request reads it; `is_used`: even then."""
        snapshot = self._contents.block_of(block_hash)
        if snapshot is not None and (is_used or self._pool.ref_count(snapshot) == 0):
            self._contents.remove(snapshot)
            self._pool.share([snapshot])
            self._pool.release(snapshot, keep=False)

    def _release_arriving(self, own: RequestStates) -> None:
        if own.arriving >= 0:
            self._pool.release(own.arriving, keep=own.arriving in self._contents)
            own.arriving = NO_STATE

    def _release_source(self, own: RequestStates) -> None:
        if own.source >= 0:
            self._pool.release(own.source, keep=own.source in self._contents)
