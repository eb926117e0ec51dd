"""Block tables of requests: grow, share, publish, free. Owns the rules; knows no scheduling and no tensors."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fastdeploy_sd.engine.kvcache.block_pool import BlockPool
from fastdeploy_sd.engine.kvcache.cache_listener import CacheListener
from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, PrefixCache
from fastdeploy_sd.types import I32, RequestId

TokenIds: TypeAlias = "I32 | array[int]"
"""Ids of 4 bytes each."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in token order; only `KVCacheManager` changes it.

    With block_size 4, after 10 tokens were computed and 9 of them are committed:

        tokens      0  1  2  3 | 4  5  6  7 | 8  d  .  .
        blocks      block_ids[0] block_ids[1] block_ids[2]     num_slots = 12
        hashes      hashes[0]    hashes[1]                     num_published = 2

    Attributes:
        request_id: owner.
        salt: requests share blocks only with the same salt.
        num_slots: tokens that fit into the blocks, len(block_ids) * block_size.
        hashes: chain hashes of leading full blocks of committed tokens. Tokens do not change once committed, so they
            outlive the blocks: after preemption nothing is hashed again.
        num_published: leading blocks that have been offered to the prefix cache or came from it.
        failed_admission: the last one, None = it did not fail.
    """

    request_id: RequestId
    salt: str = ""
    block_ids: list[int] = field(default_factory=list)
    num_slots: int = 0
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    failed_admission: FailedAdmission | None = None


@dataclass(frozen=True, slots=True)
class FailedAdmission:
    """The moment at which there were not enough blocks for a request.

    Attributes:
        num_releases: of the pool.
        missing_hash: of its match.
    """

    num_releases: int
    missing_hash: bytes | None


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that hold a request's first `num_tokens` tokens. Valid until blocks are next allocated.

    Attributes:
        missing_hash: of the first block that is not cached; None = more could not be matched.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    missing_hash: bytes | None = None


NO_MATCH = PrefixMatch((), 0)


class KVCacheManager:
    """Gives blocks to requests and finds blocks that already hold a request's prefix.

    Only blocks whose tokens are all committed are ever published: a draft that may still be rejected never becomes
    visible to another request.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache()
        self._tables: dict[RequestId, BlockTable] = {}
        self._held: dict[str, Sequence[int]] = {}
        self._listener: CacheListener | None = None

    def listen(self, listener: CacheListener) -> None:
        """Tell somebody about every block that is published, lost or discarded from now on."""
        self._listener = listener

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks without content."""
        return self._pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks nobody refers to whose content can be reused."""
        return self._pool.num_cached_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks needed to hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: RequestId) -> BlockTable:
        """Return the table of a request that has been admitted."""
        return self._tables[request_id]

    def match_prefix(self, table: BlockTable, token_ids: TokenIds, num_tokens: int) -> PrefixMatch:
        """Find the longest cached prefix, whole blocks only, and never all the tokens.

        At least one token is left to compute, since its logits are what the request came for:

            tokens     [0 ................................ num_tokens)
            candidates [0 .. B) [B .. 2B) ... up to (num_tokens - 1) // B blocks

        Args:
            table: without blocks; hashes computed on the way are kept in it.
            token_ids: i32[>= num_tokens], committed tokens.
        """
        assert not table.block_ids, f"request {table.request_id} has blocks already"
        if not self._enable_prefix_caching:
            return NO_MATCH
        block_ids, missing_hash = [], None
        for i in range((num_tokens - 1) // self.block_size):
            content = self.describe_block(table, token_ids, i)
            block_id = self._prefix_cache.find(content.hash, content.parent, content.tokens)
            if block_id is None:
                missing_hash = content.hash
                break
            block_ids.append(block_id)
        return PrefixMatch(tuple(block_ids), len(block_ids) * self.block_size, missing_hash)

    def admit(self, table: BlockTable, match: PrefixMatch, num_tokens: int) -> bool:
        """Give a request its matched blocks and new ones up to `num_tokens` tokens.

        Returns:
            False, with nothing changed, when there are not enough blocks.
        """
        num_new = self.num_blocks_for(num_tokens) - len(match.block_ids)
        num_idle_matched = sum(self._pool.ref_count(block_id) == 0 for block_id in match.block_ids)
        if num_new > self._pool.num_available_blocks - num_idle_matched:
            table.failed_admission = FailedAdmission(self._pool.num_releases, match.missing_hash)
            return False
        table.failed_admission = None
        self._pool.share(match.block_ids)  # first, so that the allocation cannot evict them
        table.block_ids = [*match.block_ids, *self._allocate(num_new)]
        table.num_slots = len(table.block_ids) * self.block_size
        table.num_published = len(match.block_ids)
        self._tables[table.request_id] = table
        return True

    def fits_without(self, tables: Sequence[BlockTable], match: PrefixMatch, num_tokens: int) -> bool:
        """Whether `admit` would succeed if the blocks of these tables were given back.

        Blocks that others refer to as well stay where they are; those of the match are not there to be given away.
        """
        counts = Counter(block_id for table in tables for block_id in table.block_ids)
        released = {block_id for block_id, count in counts.items() if count == self._pool.ref_count(block_id)}
        num_idle_matched = sum(
            self._pool.ref_count(block_id) == 0 or block_id in released for block_id in match.block_ids
        )
        num_available = self._pool.num_available_blocks + len(released) - num_idle_matched
        return self.num_blocks_for(num_tokens) - len(match.block_ids) <= num_available

    def is_still_refused(self, table: BlockTable) -> bool:
        """Whether the last admission failed and would fail again, whatever `match_prefix` finds now. O(1).

        Without a release no block has become available, and unless the next block of its prefix was published the match
        is no longer than it was. A block that left the match in between, or was taken by somebody, is one more to
        allocate or one less to allocate from.
        """
        failed = table.failed_admission
        if failed is None or failed.num_releases != self._pool.num_releases:
            return False
        return failed.missing_hash is None or not self._prefix_cache.has_hash(failed.missing_hash)

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Grow a table to hold `num_tokens` tokens.

        Returns:
            False, with nothing changed, when there are not enough blocks.
        """
        if num_tokens <= table.num_slots:
            return True
        num_new = self.num_blocks_for(num_tokens) - len(table.block_ids)
        if num_new > self._pool.num_available_blocks:
            return False
        table.block_ids += self._allocate(num_new)
        table.num_slots = len(table.block_ids) * self.block_size
        return True

    def extend_as_far_as_possible(self, table: BlockTable, num_tokens: int) -> None:
        """Grow a table towards `num_tokens` tokens with the blocks there are; `num_slots` says how far it got."""
        num_wanted = self.num_blocks_for(num_tokens) - len(table.block_ids)
        num_new = min(num_wanted, self._pool.num_available_blocks)
        if num_new > 0:
            self.extend(table, table.num_slots + num_new * self.block_size)

    def publish(self, table: BlockTable, token_ids: TokenIds, num_computed_tokens: int) -> None:
        """Offer the blocks that have become full of committed, computed tokens.

        Args:
            token_ids: i32[>= num_computed_tokens], committed tokens.
            num_computed_tokens: tokens whose KV is in the cache and which are committed.
        """
        num_full = num_computed_tokens // self.block_size
        if num_full <= table.num_published or not self._enable_prefix_caching:
            return
        for i in range(table.num_published, num_full):
            content = self.describe_block(table, token_ids, i)
            if self._prefix_cache.insert(table.block_ids[i], content) and self._listener is not None:
                self._listener.published(table.block_ids[i], content)
        table.num_published = num_full

    def free(self, table: BlockTable, *, discard: bool = False) -> None:
        """Take a table's blocks back; the table can be admitted again. Nothing happens if it has none.

        Args:
            discard: the KV is suspect: none of these blocks may be found by another request from now on, those it
                shares included.
        """
        if discard and self._listener is not None:
            self._listener.lost(table.block_ids)
            self._listener.discarded(table.hashes)
        for block_id in reversed(table.block_ids):  # a chain is evicted from its end
            if discard:
                self._prefix_cache.remove(block_id)
            self._pool.release(block_id, keep=block_id in self._prefix_cache)
        table.block_ids = []
        table.num_slots = table.num_published = 0
        self._tables.pop(table.request_id, None)

    def hold(self, name: str, block_ids: Sequence[int]) -> None:
        """Keep blocks that somebody has as they are until `release`, whatever becomes of those who have them."""
        assert name not in self._held, f"{name} holds blocks already"
        self._pool.share(block_ids)
        self._held[name] = tuple(block_ids)

    def release(self, name: str) -> None:
        """Give back what was held under this name."""
        for block_id in reversed(self._held.pop(name)):
            self._pool.release(block_id, keep=block_id in self._prefix_cache)

    def check_integrity(self) -> None:
        """Verify every block and hash. O(blocks); for tests and the end of a server.

        Raises:
            AssertionError: naming the broken rule.
        """
        owners = [table.block_ids for table in self._tables.values()]
        self._pool.check_integrity([block_id for blocks in (*owners, *self._held.values()) for block_id in blocks])
        self._prefix_cache.check_integrity(self.block_size)
        idle = {block_id for block_id in self._prefix_cache if self._pool.ref_count(block_id) == 0}
        wrong = sorted(idle.symmetric_difference(self._pool.cached_block_ids))
        assert not wrong, f"{len(wrong)} blocks are kept for reuse and unknown, or known and not kept: {wrong[:9]}"
        for table in self._tables.values():
            self._check_table(table)

    def _check_table(self, table: BlockTable) -> None:
        name = f"request {table.request_id}"
        assert table.num_slots == len(table.block_ids) * self.block_size, f"{name}: wrong num_slots"
        assert len(set(table.block_ids)) == len(table.block_ids), f"{name}: a block twice in its table"
        parent = self._prefix_cache.root(table.salt)
        for block_id, block_hash in zip(table.block_ids[: table.num_published], table.hashes, strict=False):
            content = self._prefix_cache.content(block_id)
            if content is not None:
                assert (content.parent, content.hash) == (parent, block_hash), f"{name}: block {block_id} off the chain"
            parent = block_hash
        for block_id in table.block_ids[table.num_published :]:
            assert block_id not in self._prefix_cache, f"{name}: block {block_id} was published too early"

    def _allocate(self, count: int) -> list[int]:
        block_ids = self._pool.allocate(count)
        if self._listener is not None:
            self._listener.lost(block_ids)
        for block_id in block_ids:
            self._prefix_cache.remove(block_id)
        return block_ids

    def describe_block(self, table: BlockTable, token_ids: TokenIds, i: int) -> CachedBlock:
        """Return the content of the request's i-th full block; its hash is computed once in the request's life."""
        hashes = table.hashes
        parent = hashes[i - 1] if i else self._prefix_cache.root(table.salt)
        tokens = token_ids[i * self.block_size : (i + 1) * self.block_size].tobytes()
        if i == len(hashes):
            hashes.append(self._prefix_cache.chain(parent, tokens))
        return CachedBlock(hashes[i], parent, tokens)
