"""Which full blocks of committed tokens can be reused, by chained hash. Knows no reference counts and no requests."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """Content of a block: `tokens` (the bytes of block_size i32 ids) after the prefix that hashes to `parent`."""

    hash: bytes
    parent: bytes
    tokens: bytes


class CacheListener(Protocol):
    """Keeps copies of cached blocks; is told before anything else happens to them."""

    def published(self, block_id: int, content: CachedBlock) -> None:
        """A block can be found from now on; its content stays until `lost`."""

    def lost(self, block_ids: Sequence[int]) -> None:
        """Blocks were given away: their content may be overwritten when this returns."""

    def discarded(self, block_hashes: Sequence[bytes]) -> None:
        """Contents are suspect: no copy may be found either."""


class PrefixCache:
    """Maps the hash of a prefix that ends at a block border to the block that holds its last tokens.

        hash[0] = H(root(salt) + tokens[0:B])      hash[i] = H(hash[i-1] + tokens[i*B:(i+1)*B])

    A hash therefore names the salt and every token up to the end of its block. On a hit the block's tokens and its
    parent hash are compared too; as a chain is walked from its root, that compares every token of the prefix.
    """

    def __init__(self) -> None:
        self._block_of_hash: dict[bytes, int] = {}
        self._content: dict[int, CachedBlock] = {}
        self.num_inserted = 0

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._content

    def __iter__(self) -> Iterator[int]:
        return iter(self._content)

    @staticmethod
    def root(salt: str, group: int = 0) -> bytes:
        """Parent hash of the first block; different salts, and different KV groups, never share a block."""
        person = f"salt{group or ''}".encode()
        return hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=person).digest()

    @staticmethod
    def chain(parent: bytes, tokens: bytes) -> bytes:
        """Hash of a block from its parent's hash and its tokens."""
        return hashlib.blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()

    def has_hash(self, block_hash: bytes) -> bool:
        return block_hash in self._block_of_hash

    def block_of(self, block_hash: bytes) -> int | None:
        """The block whose prefix hashes to this, whatever its tokens are."""
        return self._block_of_hash.get(block_hash)

    def find(self, block_hash: bytes, parent: bytes, tokens: bytes) -> int | None:
        block_id = self._block_of_hash.get(block_hash)
        if block_id is None:
            return None
        content = self._content[block_id]
        return block_id if content.tokens == tokens and content.parent == parent else None

    def insert(self, block_id: int, content: CachedBlock) -> bool:
        """Offer a block's content; False, and nothing happens, if another block holds the same content already."""
        if content.hash in self._block_of_hash:
            return False
        self._block_of_hash[content.hash] = block_id
        self._content[block_id] = content
        self.num_inserted += 1
        return True

    def remove(self, block_id: int) -> None:
        """Forget a block's content; nothing happens if none was known."""
        content = self._content.pop(block_id, None)
        if content is not None:
            del self._block_of_hash[content.hash]

    def content(self, block_id: int) -> CachedBlock | None:
        return self._content.get(block_id)

    def check_integrity(self, block_sizes: Collection[int]) -> None:
        """Verify that hashed blocks are full, hash to their key, and that both maps agree."""
        assert len(self._block_of_hash) == len(self._content), "a hash without a block, or a block without a hash"
        for block_id, content in self._content.items():
            assert self._block_of_hash.get(content.hash) == block_id, f"block {block_id} is not the one of its hash"
            assert len(content.tokens) // 4 in block_sizes, f"hashed block {block_id} is not full"
            assert self.chain(content.parent, content.tokens) == content.hash, f"block {block_id} has a wrong hash"
