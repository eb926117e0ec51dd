"""Finds the blocks that hold a request's prefix already. Knows hashes and groups; knows no reference counts."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

from fastdeploy_sd.engine.kvcache.block_table import NO_BLOCK, BlockTable, PrefixMatch
from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, PrefixCache
from fastdeploy_sd.types import I32
from fastdeploy_sd.types.kv_groups import KvGroup

TokenIds: TypeAlias = "I32 | array[int]"
"""Ids of 4 bytes each."""
Find: TypeAlias = "Callable[[int, int, CachedBlock], int | None]"
"""Returns where block i of group g is, given g, i and its content; None = it is nowhere."""


class PrefixMatcher:
    """Walks the chains of a request's block hashes, one per KV group; `is_plain`: one group, of full attention.

    `alignment`: tokens between the ends that a match may have.
    """

    def __init__(self, prefix_cache: PrefixCache, groups: Sequence[KvGroup]) -> None:
        self._prefix_cache, self._groups = prefix_cache, groups
        self.is_plain = len(groups) == 1 and groups[0].window is None
        self.alignment = math.lcm(*(group.block_size for group in groups))

    def describe_block(self, table: BlockTable, token_ids: TokenIds, i: int, g: int = 0) -> CachedBlock:
        """Return the content of the request's i-th full block in group g; it is hashed once in the request's life."""
        hashes, size = table.groups[g].hashes, self._groups[g].block_size
        parent = hashes[i - 1] if i else self._prefix_cache.root(table.salt, g)
        tokens = token_ids[i * size : (i + 1) * size].tobytes()
        if i == len(hashes):
            hashes.append(self._prefix_cache.chain(parent, tokens))
        return CachedBlock(hashes[i], parent, tokens)

    def match(self, table: BlockTable, token_ids: TokenIds, num_tokens: int) -> PrefixMatch:
        """Return the longest prefix of fewer than `num_tokens` tokens whose blocks are cached; see KVCacheManager."""
        return self.longest(table, token_ids, num_tokens, self.cached)

    def longest(self, table: BlockTable, token_ids: TokenIds, num_tokens: int, find: Find) -> PrefixMatch:
        """Return the longest prefix of fewer than `num_tokens` tokens whose blocks are found, and what was found."""
        if not self.is_plain:
            return self._longest_of_groups(table, token_ids, num_tokens, find)
        block_ids, missing_hash, block_size = [], None, self.alignment
        for i in range((num_tokens - 1) // block_size):
            content = self.describe_block(table, token_ids, i)
            block_id = find(0, i, content)
            if block_id is None:
                missing_hash = content.hash
                break
            block_ids.append(block_id)
        return PrefixMatch((tuple(block_ids),), len(block_ids) * block_size, missing_hash)

    def cached(self, _g: int, _i: int, content: CachedBlock) -> int | None:
        """See Find: in the cache."""
        return self._prefix_cache.find(content.hash, content.parent, content.tokens)

    def _longest_of_groups(self, table: BlockTable, token_ids: TokenIds, num_tokens: int, find: Find) -> PrefixMatch:
        end = (num_tokens - 1) // self.alignment * self.alignment
        found: list[list[int]] = []  # per group and block, NO_BLOCK = it is not found
        runs: list[list[int]] = []  # per group and number of blocks: how many before it are found in a row
        for g, group in enumerate(self._groups):
            found.append([])
            runs.append([0])
            for i in range(end // group.block_size):
                block_id = find(g, i, self.describe_block(table, token_ids, i, g))
                if block_id is None and group.window is None:
                    end = i * group.block_size // self.alignment * self.alignment
                    break
                found[g].append(NO_BLOCK if block_id is None else block_id)
                runs[g].append(0 if block_id is None else runs[g][-1] + 1)
        while any(
            runs[g][end // group.block_size] < end // group.block_size - group.first_block(end)
            for g, group in enumerate(self._groups)
        ):
            end -= self.alignment
        block_ids = []
        for group, ids in zip(self._groups, found, strict=True):
            first = group.first_block(end)
            block_ids.append((*[NO_BLOCK] * first, *ids[first : end // group.block_size]))
        return PrefixMatch(tuple(block_ids), end)
