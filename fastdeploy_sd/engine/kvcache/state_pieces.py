"""Snapshots of recurrent states in the second level: each is a chain of pieces that follows its block's hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, CacheListener, PrefixCache


class StatePieces:
    """Tells a listener for blocks of the pieces of snapshots, as if they were blocks.

        KV blocks    ... -> block i -> block i + 1 -> ...
        pieces of              \\-> piece 0 -> piece 1 -> ...   of the snapshot at the end of block i

    A piece has negative numbers in place of its tokens, so no block has its hash. Slots that hold blocks may hold
    pieces: what is least recently used is overwritten, and of a snapshot the last piece first.

    Args:
        copies: is told.
        num_blocks: of the KV cache; pieces are numbered after them.
        count: pieces of a snapshot. block_size: tokens of a block of the first KV group.
    """

    def __init__(self, copies: CacheListener, num_blocks: int, count: int, block_size: int) -> None:
        self._copies, self._num_blocks, self._count = copies, num_blocks, count
        self._marks = [np.full(block_size, -1 - i, np.int32).tobytes() for i in range(count)]

    def ids(self, snapshot: int) -> range:
        """Return the numbers of a snapshot's pieces."""
        begin = self._num_blocks + snapshot * self._count
        return range(begin, begin + self._count)

    def contents(self, block_hash: bytes) -> Iterator[CachedBlock]:
        """Return what the pieces of a snapshot hold that belongs to this block."""
        parent = block_hash
        for mark in self._marks:
            content = CachedBlock(PrefixCache.chain(parent, mark), parent, mark)
            yield content
            parent = content.hash

    def published(self, snapshot: int, content: CachedBlock) -> None:
        """See CacheListener, of snapshots."""
        for piece, part in zip(self.ids(snapshot), self.contents(content.hash), strict=True):
            self._copies.published(piece, part)

    def lost(self, snapshots: Sequence[int]) -> None:
        """See CacheListener, of snapshots."""
        self._copies.lost([piece for snapshot in snapshots for piece in self.ids(snapshot)])

    def discarded(self, block_hashes: Sequence[bytes]) -> None:
        """See CacheListener, of snapshots."""
        self._copies.discarded([part.hash for block_hash in block_hashes for part in self.contents(block_hash)])
