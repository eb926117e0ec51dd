from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, PrefixCache


def content(parent: bytes, *token_ids: int) -> CachedBlock:
    tokens = np.array(token_ids, np.int32).tobytes()
    return CachedBlock(PrefixCache.chain(parent, tokens), parent, tokens)


def find(cache: PrefixCache, block: CachedBlock) -> int | None:
    return cache.find(block.hash, block.parent, block.tokens)


def test_a_block_is_found_by_its_whole_prefix() -> None:
    cache, root = PrefixCache(), PrefixCache.root("")
    first, second = content(root, 1, 2), content(content(root, 1, 2).hash, 3, 4)
    cache.insert(7, first)
    cache.insert(9, second)
    assert find(cache, first) == 7
    assert find(cache, second) == 9
    assert find(cache, content(root, 3, 4)) is None, "same tokens, other prefix"
    assert find(cache, content(PrefixCache.root("tenant"), 1, 2)) is None, "same tokens, other salt"


def test_a_hash_collision_is_a_miss() -> None:
    cache, root = PrefixCache(), PrefixCache.root("")
    block, other = content(root, 1, 2), content(root, 8, 9)
    cache.insert(0, block)
    assert cache.find(block.hash, root, other.tokens) is None
    assert cache.find(block.hash, other.hash, block.tokens) is None


def test_the_first_block_with_a_content_stays() -> None:
    cache, block = PrefixCache(), content(PrefixCache.root(""), 1)
    cache.insert(0, block)
    cache.insert(1, block)
    assert find(cache, block) == 0
    assert list(cache) == [0]
    cache.remove(1)
    assert find(cache, block) == 0
    cache.remove(0)
    assert find(cache, block) is None
    assert len(cache) == 0


def test_integrity_notices_a_partial_block_and_a_wrong_hash() -> None:
    root = PrefixCache.root("")
    partial = PrefixCache()
    partial.insert(0, content(root, 1))
    with pytest.raises(AssertionError, match="not full"):
        partial.check_integrity([2])
    wrong, block = PrefixCache(), content(root, 1, 2)
    wrong.insert(0, CachedBlock(block.hash, block.hash, block.tokens))
    with pytest.raises(AssertionError, match="wrong hash"):
        wrong.check_integrity([2])
