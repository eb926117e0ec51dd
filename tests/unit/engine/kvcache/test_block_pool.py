from __future__ import annotations

import random

import pytest

from fastdeploy_sd.engine.kvcache.block_pool import BlockPool


def test_free_blocks_go_first_then_the_least_recently_used_cached_ones() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    assert blocks == [0, 1, 2, 3]
    for block_id in (2, 0, 3):
        pool.release(block_id, keep=True)
    pool.release(1, keep=False)
    assert (pool.num_free_blocks, pool.num_cached_blocks, pool.num_available_blocks) == (2, 3, 5)
    assert pool.allocate(4) == [1, 4, 2, 0]
    assert pool.cached_block_ids == [3]
    pool.check_integrity([1, 4, 2, 0])


def test_sharing_makes_a_cached_block_recently_used() -> None:
    pool = BlockPool(3)
    for block_id in pool.allocate(3):
        pool.release(block_id, keep=True)
    pool.share([0])
    pool.share([0])
    assert pool.ref_count(0) == 2
    pool.release(0, keep=True)
    assert pool.cached_block_ids == [1, 2]
    pool.release(0, keep=True)
    assert pool.cached_block_ids == [1, 2, 0]


def test_more_than_available_is_a_caller_error() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="allocate 2 blocks, only 1 left"):
        pool.allocate(2)


def test_releasing_a_free_block_is_an_error() -> None:
    with pytest.raises(AssertionError, match="block 0, which has no reference"):
        BlockPool(1).release(0, keep=False)


@pytest.mark.parametrize(
    ("referenced", "message"),
    [([0], "references counted"), ([0, 1, 1], "references counted")],
)
def test_integrity_notices_references_nobody_counted(referenced: list[int], message: str) -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.check_integrity([0, 1])
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(referenced)


def test_random_walk_against_a_plain_model() -> None:
    rng, pool = random.Random(0), BlockPool(12)
    held: list[int] = []
    cached: list[int] = []
    for _ in range(3000):
        action = rng.random()
        if action < 0.4:
            count = rng.randint(0, pool.num_available_blocks)
            num_evicted = max(0, count - pool.num_free_blocks)
            got = pool.allocate(count)
            assert got[count - num_evicted :] == cached[:num_evicted]
            del cached[:num_evicted]
            held += got
        elif action < 0.5 and cached:
            block_id = cached.pop(rng.randrange(len(cached)))
            pool.share([block_id])
            held.append(block_id)
        elif action < 0.6 and held:
            held.append(rng.choice(held))
            pool.share(held[-1:])
        elif held:
            block_id = held.pop(rng.randrange(len(held)))
            keep = rng.random() < 0.5
            pool.release(block_id, keep=keep)
            if keep and block_id not in held:
                cached.append(block_id)
        assert pool.cached_block_ids == cached
        pool.check_integrity(held)
