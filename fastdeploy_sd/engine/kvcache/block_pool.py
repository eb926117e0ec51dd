"""The blocks of the KV cache: who refers to them and which one to give away next. Knows no tokens and no hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts over a fixed set of blocks; every operation is O(1) per block.

    A block is in exactly one of three states:

        free        no content worth keeping; given away first, most recently freed first
        cached      reference count 0, content worth keeping; given away least recently used first
        referenced  reference count >= 1

        free --allocate--> referenced --release(keep=False)--> free
        cached --allocate--> referenced --release(keep=True)--> cached
        cached --share-----> referenced
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; block 0 is given away first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.num_releases = 0  # of blocks; as long as it stays the same, availability can only have fallen

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that `allocate` can hand out: free + cached."""
        return len(self._free) + len(self._cached)

    @property
    def cached_block_ids(self) -> list[int]:
        """Cached blocks, the next one to give away first. O(cached blocks)."""
        return list(self._cached)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with reference count 1. The content of a cached one is lost.

        The caller must forget what it knew about the content of every block returned.
        """
        assert count <= self.num_available_blocks, f"allocate {count} blocks, only {self.num_available_blocks} left"
        num_from_free = min(count, len(self._free))
        split = len(self._free) - num_from_free
        block_ids = self._free[split:]
        del self._free[split:]
        block_ids.reverse()
        block_ids.extend(self._cached.popitem(last=False)[0] for _ in range(count - num_from_free))
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are cached or referenced, never free."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_id: int, *, keep: bool) -> None:
        """Drop a reference; the last one makes the block cached (most recently used) if `keep`, else free."""
        count = self._ref_counts[block_id] - 1
        assert count >= 0, f"release of block {block_id}, which has no reference"
        self._ref_counts[block_id] = count
        if count == 0:
            self.num_releases += 1
            if keep:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def check_integrity(self, referenced: Sequence[int]) -> None:
        """Verify that every block is in one state and that `referenced`, all tables' blocks, agrees with the counts."""
        counts = [0] * self.num_blocks
        for block_id in referenced:
            counts[block_id] += 1
        if counts != self._ref_counts:
            wrong = [(i, n, m) for i, (n, m) in enumerate(zip(self._ref_counts, counts, strict=True)) if n != m]
            raise AssertionError(f"(block, references counted, references held) of {len(wrong)} blocks: {wrong[:9]}")
        idle = [*self._free, *self._cached]
        assert len(set(idle)) == len(idle), "a block is free or cached twice"
        num_referenced = self.num_blocks - counts.count(0)
        assert len(idle) + num_referenced == self.num_blocks, (
            f"{len(self._free)} free + {len(self._cached)} cached + {num_referenced} referenced != {self.num_blocks}"
        )
        assert not any(map(counts.__getitem__, idle)), "a referenced block is free or cached"
