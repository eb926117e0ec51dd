"""Block tables of requests: grow, share, publish, free. Owns the rules; knows no scheduling and no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fastdeploy_sd.engine.kvcache.block_pool import BlockPool
from fastdeploy_sd.engine.kvcache.block_table import (
    NO_BLOCK,
    NO_MATCH,
    BlockTable,
    FailedAdmission,
    GroupBlocks,
    PrefixMatch,
)
from fastdeploy_sd.engine.kvcache.prefix_cache import CacheListener, PrefixCache
from fastdeploy_sd.engine.kvcache.prefix_matcher import PrefixMatcher, TokenIds
from fastdeploy_sd.engine.kvcache.state_cache import StateCache
from fastdeploy_sd.types import RequestId
from fastdeploy_sd.types.kv_groups import KvGroup


class KVCacheManager:
    """Gives blocks to requests and finds blocks that already hold a request's prefix.

    All KV groups take their blocks from one pool. A request has a block table per group.

    Only blocks whose tokens are all committed are ever published: a draft that may still be rejected never becomes
    visible to another request.

    Attributes:
        block_size: tokens of the smallest block.
        states: snapshots of recurrent states, None = the model has no such states.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KvGroup],
        *,
        enable_prefix_caching: bool,
        num_snapshots: int | None = None,
    ) -> None:
        """Make an empty cache; `num_snapshots`: places for those of recurrent states, None = it has no such states."""
        self.groups = tuple(groups)
        self.block_size = min(group.block_size for group in groups)
        self.has_windows = any(group.window is not None for group in groups)
        self._enable_prefix_caching = enable_prefix_caching
        self._pool, self._prefix_cache = BlockPool(num_blocks), PrefixCache()
        self.prefixes = PrefixMatcher(self._prefix_cache, self.groups)
        self.states: StateCache | None = None
        if num_snapshots is not None:
            self.states = StateCache(num_snapshots * enable_prefix_caching, self.prefixes, groups[0].block_size)
        self._tables: dict[RequestId, BlockTable] = {}
        self._held: dict[str, list[int]] = {}
        self.listener: CacheListener | None = None  # is told of every block that is published, lost or discarded

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without references whose content can be reused."""
        return self._pool.num_cached_blocks

    def table(self, request_id: RequestId) -> BlockTable:
        """Return the table of a request that has been admitted."""
        return self._tables[request_id]

    def match_prefix(self, table: BlockTable, token_ids: TokenIds, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix, whole blocks only, and never all the tokens.

        At least one token is left to compute, since its logits are what the request came for:

            tokens     [0 ................................ num_tokens)
            candidates [0 .. B) [B .. 2B) ... up to (num_tokens - 1) // B blocks

        Of a group with a window only the blocks that the next token attends to need be cached. A model with recurrent
        states also needs a snapshot at the end of the prefix.
        """
        assert not table.num_slots, f"request {table.request_id} has blocks already"
        if not self._enable_prefix_caching:
            return NO_MATCH
        table.add_groups(len(self.groups))
        matcher = self.prefixes if self.states is None else self.states
        return matcher.match(table, token_ids, num_tokens)

    def num_unshared(self, match: PrefixMatch, salts: Sequence[str], token_ids: TokenIds) -> int:
        """Return how many more of these tokens than `match` found are cached for requests with one of these salts.

        0 where `admit` would fail: that is tried again and again, and looking hashes the tokens.
        """
        if not salts or not self.fits_without((), match, len(token_ids)):
            return 0
        tables = [BlockTable("", salt) for salt in salts]
        found = [self.match_prefix(table, token_ids, len(token_ids)).num_tokens for table in tables]
        return max(0, max(found) - match.num_tokens)

    def admit(self, table: BlockTable, match: PrefixMatch, num_tokens: int) -> bool:
        """Give a request its matched blocks and new ones for `num_tokens`; False, unchanged, if there are too few."""
        counts, num_available = match.num_missing(self.groups, num_tokens), self._pool.num_available_blocks
        shared = match.shared_block_ids
        num_idle_matched = sum(self._pool.ref_count(block_id) == 0 for block_id in shared)
        if sum(counts) > num_available - num_idle_matched:
            num_releases, missing_hash = self._pool.num_releases, match.missing_hash
            table.failed_admission = FailedAdmission(num_releases, self._num_publications, missing_hash)
            return False
        table.failed_admission = None
        self._pool.share(shared)  # first, so that the allocation cannot evict them
        table.add_groups(len(self.groups))
        for g, ids in enumerate(match.block_ids):
            own = table.groups[g]
            own.block_ids, own.num_published = list(ids), len(ids)
            own.num_freed = self.groups[g].first_block(match.num_tokens)
        if self.states is not None:
            self.states.begin(table, match, num_tokens)
        self._grow(table, counts)
        self._tables[table.request_id] = table
        return True

    def fits_without(self, tables: Sequence[BlockTable], match: PrefixMatch, num_tokens: int) -> bool:
        """Whether `admit` would succeed if the blocks of these tables were given back.

        Blocks that others refer to as well stay where they are; those of the match are not there to be given away.
        """
        counts = Counter(block_id for table in tables for block_id in table.block_ids)
        del counts[NO_BLOCK]
        released = {block_id for block_id, count in counts.items() if count == self._pool.ref_count(block_id)}
        num_idle_matched = sum(
            self._pool.ref_count(block_id) == 0 or block_id in released for block_id in match.shared_block_ids
        )
        num_available = self._pool.num_available_blocks + len(released) - num_idle_matched
        return sum(match.num_missing(self.groups, num_tokens)) <= num_available

    def is_still_refused(self, table: BlockTable) -> bool:
        """Whether the last admission failed and would fail again, whatever `match_prefix` finds now. O(1).

        Without a release no block has become available, and unless the next block of its prefix was published the match
        is no longer than it was. With several groups, or with states, any publication may have made it longer. A block
        that left the match in between, or went to another request, is one more to allocate or one less to allocate
        from.
        """
        failed = table.failed_admission
        if failed is None or failed.num_releases != self._pool.num_releases:
            return False
        if failed.missing_hash is None:
            return (self.prefixes.is_plain and self.states is None) or failed.num_publications == self._num_publications
        return not self._prefix_cache.has_hash(failed.missing_hash)

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Grow a table to hold `num_tokens` tokens; False, with nothing changed, when there are not enough blocks."""
        if num_tokens <= table.num_slots:
            return True
        counts = table.num_missing(self.groups, num_tokens)
        if sum(counts) > self._pool.num_available_blocks:
            return False
        self._grow(table, counts)
        return True

    def extend_as_far_as_possible(self, table: BlockTable, num_tokens: int) -> None:
        """Grow a table towards `num_tokens` tokens with the blocks there are; `num_slots` says how far it got."""
        num_available = self._pool.num_available_blocks
        while num_tokens > table.num_slots:
            counts = table.num_missing(self.groups, num_tokens)
            num_missing = sum(counts) - num_available
            if num_missing <= 0:
                self._grow(table, counts)
                return
            # A block of every group less, as often as is needed at least.
            num_fewer = -(-num_missing // len(counts)) * self.block_size
            num_tokens = (num_tokens - 1) // self.block_size * self.block_size + self.block_size - num_fewer

    def skip_to(self, table: BlockTable, num_known_tokens: int, num_tokens: int) -> bool:
        """Let the KV of so many tokens come from elsewhere: with windows, only the end of it has blocks.

        False, with nothing changed, when there are not enough blocks for that and a step after it, of `num_tokens` at
        most.
        """
        firsts, counts = [group.first_carried_block(num_known_tokens + 1) for group in self.groups], []
        for group, own, first in zip(self.groups, table.groups, firsts, strict=True):
            num_blocks = group.num_blocks(group.admitted_tokens(num_known_tokens, num_tokens))
            counts.append(max(num_blocks - max(len(own.block_ids), first), 0))
        if sum(counts) > self._pool.num_available_blocks:
            return False
        for own, first in zip(table.groups, firsts, strict=True):
            own.block_ids += [NO_BLOCK] * (first - len(own.block_ids))
            self._free_before(own, first)
        self._grow(table, counts)
        return True

    def publish(self, table: BlockTable, token_ids: TokenIds, num_computed_tokens: int) -> None:
        """Offer the blocks that have become full of committed tokens whose KV is in the cache."""
        if not self._enable_prefix_caching:
            return
        for g, own in enumerate(table.groups):
            num_full = num_computed_tokens // self.groups[g].block_size
            if num_full <= own.num_published:
                continue
            for i in range(own.num_published, num_full):
                content = self.prefixes.describe_block(table, token_ids, i, g)
                is_new = own.block_ids[i] != NO_BLOCK and self._prefix_cache.insert(own.block_ids[i], content)
                if is_new and self.listener is not None:
                    self.listener.published(own.block_ids[i], content)
            own.num_published = num_full

    def free_before_windows(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Give back the blocks that no token after the computed, committed ones attends to.

        Drafts are not counted: while they may be rejected, an earlier token may come again. Comes after `publish`.
        """
        for group, own in zip(self.groups, table.groups, strict=True):
            self._free_before(own, group.first_block(num_computed_tokens))

    def free(self, table: BlockTable, *, discard: bool = False) -> None:
        """Take a table's blocks back; the table can be admitted again. Nothing happens if it has none.

        `discard`: the KV is suspect, and none may find its blocks from now on, those it shares or gave back included.
        """
        if self.states is not None:
            self.states.free(table, discard=discard)
        for own in table.groups:
            if discard:
                self._discard(own)
            for block_id in reversed(own.block_ids[own.num_freed :]):  # a chain is evicted from its end
                self._release(block_id)
            own.block_ids = []
            own.num_freed = own.num_published = own.num_sent = 0
        table.num_slots = 0
        self._tables.pop(table.request_id, None)

    def hold(self, name: str, block_ids: Sequence[int]) -> None:
        """Keep these blocks of a request, too, as they are until `release`, whatever becomes of the request."""
        kept = [block_id for block_id in block_ids if block_id != NO_BLOCK]
        self._pool.share(kept)
        self._held.setdefault(name, []).extend(kept)

    def release(self, name: str) -> None:
        """Give back what was held under this name."""
        for block_id in reversed(self._held.pop(name, [])):
            self._release(block_id)

    def check_integrity(self) -> None:
        """Verify every block and hash. O(blocks); for tests and the end of a server."""
        owned = [own.block_ids[own.num_freed :] for table in self._tables.values() for own in table.groups]
        self._pool.check_integrity([block_id for blocks in (*owned, *self._held.values()) for block_id in blocks])
        self._prefix_cache.check_integrity({group.block_size for group in self.groups})
        if self.states is not None:
            self.states.check_integrity(self._tables.values())
        idle = {block_id for block_id in self._prefix_cache if self._pool.ref_count(block_id) == 0}
        wrong = sorted(idle.symmetric_difference(self._pool.cached_block_ids))
        assert not wrong, f"{len(wrong)} blocks are kept for reuse and unknown, or known and not kept: {wrong[:9]}"
        for table in self._tables.values():
            table.verify(self.groups, self._prefix_cache)

    @property
    def _num_publications(self) -> int:
        return self._prefix_cache.num_inserted + (0 if self.states is None else self.states.num_publications)

    def _grow(self, table: BlockTable, counts: Sequence[int]) -> None:
        block_ids, begin = self._allocate(sum(counts)), 0
        for own, count in zip(table.groups, counts, strict=True):
            own.block_ids += block_ids[begin : begin + count]
            begin += count
        table.num_slots = table.count_slots(self.groups)

    def _allocate(self, count: int) -> list[int]:
        block_ids = self._pool.allocate(count)
        if self.listener is not None:
            self.listener.lost(block_ids)
        for block_id in block_ids:
            self._prefix_cache.remove(block_id)
        return block_ids

    def _release(self, block_id: int) -> None:
        self._pool.release(block_id, keep=block_id in self._prefix_cache)

    def _free_before(self, own: GroupBlocks, end: int) -> None:
        for i in range(own.num_freed, end):
            if own.block_ids[i] != NO_BLOCK:
                self._release(own.block_ids[i])
                own.block_ids[i] = NO_BLOCK
        own.num_freed = max(own.num_freed, end)

    def _discard(self, own: GroupBlocks) -> None:
        """Let no request find a request's blocks, those that it gave back included."""
        given_back = [self._prefix_cache.block_of(block_hash) for block_hash in own.hashes[: own.num_freed]]
        suspect = [block_id for block_id in given_back if block_id is not None] + own.block_ids[own.num_freed :]
        if self.listener is not None:
            self.listener.lost(suspect)
            self.listener.discarded(own.hashes)
        self._pool.share(suspect)
        for block_id in suspect:
            self._prefix_cache.remove(block_id)
            self._release(block_id)
