"""Several KV groups over one pool: what is kept, what goes back, and what can be found again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from fastdeploy_sd.engine.kvcache.block_table import NO_BLOCK, BlockTable, GroupBlocks
from fastdeploy_sd.engine.kvcache.manager import KVCacheManager
from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, PrefixCache
from fastdeploy_sd.types import I32
from fastdeploy_sd.types.kv_groups import KvGroup, most_blocks, most_tokens

STEP = 6
FULL, WINDOW, WIDE = KvGroup(4), KvGroup(4, 10, STEP), KvGroup(8, 21, STEP)
TEXT = np.arange(200, dtype=np.int32)


def live(own: GroupBlocks) -> list[int]:
    return [block_id for block_id in own.block_ids if block_id != NO_BLOCK]


def num_idle(kv: KVCacheManager) -> int:
    return kv.num_free_blocks + kv.num_cached_blocks


class Findable:
    """A CacheListener that knows which blocks can be found."""

    def __init__(self) -> None:
        self.by_block: dict[int, CachedBlock] = {}

    def published(self, block_id: int, content: CachedBlock) -> None:
        self.by_block[block_id] = content

    def lost(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.by_block.pop(block_id, None)

    def discarded(self, block_hashes: Sequence[bytes]) -> None:
        pass

    def longest(self, groups: Sequence[KvGroup], token_ids: I32) -> int:
        """The longest prefix of fewer tokens whose needed blocks can be found, block by block from the definition."""
        hashes = {content.hash for content in self.by_block.values()}
        for end in range(len(token_ids) - 1, 0, -1):
            if all(end % group.block_size == 0 for group in groups) and all(
                chain(token_ids, group, g, i) in hashes
                for g, group in enumerate(groups)
                for i in range(end // group.block_size)
                if group.window is None or (i + 1) * group.block_size > end - group.window + 1
            ):
                return end
        return 0


def chain(token_ids: I32, group: KvGroup, g: int, i: int) -> bytes:
    """Hash of block i of a group."""
    parent = PrefixCache.root("", g)
    for k in range(i + 1):
        parent = PrefixCache.chain(parent, token_ids[k * group.block_size : (k + 1) * group.block_size].tobytes())
    return parent


def compute(kv: KVCacheManager, table: BlockTable, token_ids: I32, begin: int, end: int) -> None:
    """Run tokens [begin, end) in steps of STEP, as a scheduler would."""
    while begin < end:
        begin = min(begin + STEP, end)
        assert kv.extend(table, begin)
        kv.publish(table, token_ids, begin)
        kv.free_before_windows(table, begin)
        kv.check_integrity()


def admitted(kv: KVCacheManager, name: str, token_ids: I32) -> tuple[BlockTable, int]:
    table = BlockTable(name)
    match = kv.match_prefix(table, token_ids, len(token_ids))
    assert kv.admit(table, match, len(token_ids))
    kv.check_integrity()
    return table, match.num_tokens


def test_a_window_keeps_its_last_tokens_only() -> None:
    kv = KVCacheManager(40, [FULL, WINDOW], enable_prefix_caching=False)
    table, _ = admitted(kv, "a", TEXT[:60])
    assert [len(own.block_ids) for own in table.groups] == [15, 2], "a window's blocks are those of one step"
    compute(kv, table, TEXT, 0, 60)
    # The next token, at 60, attends to 51 .. 59.
    assert [len(live(own)) for own in table.groups] == [15, 3]
    assert table.groups[1].block_ids[:12] == [NO_BLOCK] * 12
    assert kv.num_free_blocks == 40 - 18
    kv.free(table)
    kv.check_integrity()
    assert kv.num_free_blocks == 40


def test_drafts_that_are_taken_back_across_a_windows_edge_free_nothing() -> None:
    kv = KVCacheManager(40, [WINDOW], enable_prefix_caching=False)
    table, _ = admitted(kv, "a", TEXT[:13])
    compute(kv, table, TEXT, 0, 12)
    assert table.groups[0].num_freed == 0, "token 12 attends to 3 .. 11"
    assert kv.extend(table, 18), "a token and five drafts"
    kv.free_before_windows(table, 13)  # one token was right
    assert table.groups[0].num_freed == 1, "token 13 attends to 4 .. 12"
    kv.check_integrity()


def test_a_prefix_needs_the_blocks_of_the_last_window_only() -> None:
    kv = KVCacheManager(60, [FULL, WINDOW], enable_prefix_caching=True)
    table, _ = admitted(kv, "a", TEXT[:41])
    compute(kv, table, TEXT, 0, 41)
    early = [block_id for block_id in range(60) if kv._prefix_cache.content(block_id) is not None]
    kv.free(table)
    for block_id in early:  # what holds tokens before 28 of the window is lost
        content = kv._prefix_cache.content(block_id)
        assert content is not None
        if content.hash in [chain(TEXT, WINDOW, 1, i) for i in range(7)]:
            kv._prefix_cache.remove(block_id)
            kv._pool.share([block_id])
            kv._pool.release(block_id, keep=False)
    kv.check_integrity()
    again, num_cached = admitted(kv, "b", TEXT[:41])
    assert num_cached == 40
    assert again.groups[1].block_ids[:7] == [NO_BLOCK] * 7
    assert len(live(again.groups[1])) == 3 + 1, "of tokens 28 .. 39, and of the next"
    _, num_shorter = admitted(kv, "c", TEXT[:37])
    assert num_shorter == 0, "at 36 and before, blocks of the window are gone"


def test_what_a_window_left_behind_is_discarded_too() -> None:
    kv = KVCacheManager(60, [FULL, WINDOW], enable_prefix_caching=True)
    table, _ = admitted(kv, "a", TEXT[:41])
    compute(kv, table, TEXT, 0, 41)
    kv.free(table, discard=True)
    kv.check_integrity()
    assert (kv.num_cached_blocks, kv.num_free_blocks) == (0, 60)


def test_groups_share_no_block_of_the_same_tokens() -> None:
    kv = KVCacheManager(60, [FULL, KvGroup(4)], enable_prefix_caching=True)
    table, _ = admitted(kv, "a", TEXT[:9])
    compute(kv, table, TEXT, 0, 9)
    kv.free(table)
    again, num_cached = admitted(kv, "b", TEXT[:9])
    assert num_cached == 8
    assert not set(again.groups[0].block_ids) & set(again.groups[1].block_ids)


@pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOW), (WIDE,), (FULL, WINDOW, WIDE), (FULL, KvGroup(4, 1, STEP))]
)
def test_the_longest_request_is_the_one_that_fits(groups: tuple[KvGroup, ...]) -> None:
    num_blocks = 30
    longest = min(most_tokens(groups, num_blocks), 190)
    kv = KVCacheManager(num_blocks, groups, enable_prefix_caching=False)
    table, _ = admitted(kv, "a", TEXT[:longest])
    compute(kv, table, TEXT, 0, longest)
    assert most_blocks(groups, longest) <= num_blocks
    assert longest == 190 or most_blocks(groups, longest + 1) > num_blocks


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_calls_keeps_and_finds_what_it_should(seed: int) -> None:
    """Against the definition: which blocks a request has, and which prefix is found."""
    rng = random.Random(seed)
    others = [WINDOW, WIDE, KvGroup(4, 1, STEP), KvGroup(4), KvGroup(8, 3, STEP)]
    groups = (FULL, *rng.sample(others, rng.randint(1, 3)))
    kv, findable = KVCacheManager(rng.randint(20, 90), groups, enable_prefix_caching=True), Findable()
    kv.listener = findable
    running: dict[str, tuple[BlockTable, I32, int]] = {}
    num_hits = 0
    for turn in range(120):
        name = f"r{turn}"
        if running and rng.random() < 0.7:
            name, (table, text, computed) = rng.choice(list(running.items()))
            num_drafts = rng.choice([0, 0, 3])
            end = min(computed + rng.randint(1, STEP), len(text))
            if computed == len(text) or not kv.extend(table, end) or rng.random() < 0.05:
                kv.free(table, discard=rng.random() < 0.1)  # ended, failed, or preempted for want of blocks
                del running[name]
            else:
                kv.extend_as_far_as_possible(table, end + num_drafts)
                kv.publish(table, text, end)
                kv.free_before_windows(table, end)
                running[name] = (table, text, end)
                for group, own in zip(groups, table.groups, strict=True):
                    first = 0 if group.window is None else max(end - group.window + 1, 0) // group.block_size
                    assert own.num_freed == max(first, own.num_freed)
                    assert len(live(own)) == len(own.block_ids) - first
                    if group.window is not None:
                        assert len(live(own)) <= group.num_blocks(group.window - 1 + STEP + 3) + 1
        else:
            begin = rng.choice([0, 0, 100])
            stem = range(begin, begin + rng.randint(1, 60))
            text = np.array([*stem, *rng.sample(range(200, 300), 2)], np.int32)
            table = BlockTable(name)
            match = kv.match_prefix(table, text, len(text))
            assert match.num_tokens == findable.longest(groups, text)
            num_hits += match.num_tokens > 0
            num_before, fits = num_idle(kv), kv.fits_without([], match, len(text))
            assert kv.admit(table, match, len(text)) == fits
            if fits:
                running[name] = (table, text, match.num_tokens)
            else:
                assert num_idle(kv) == num_before
                assert kv.is_still_refused(table)
        kv.check_integrity()
    for table, _, _ in running.values():
        kv.free(table)
    kv.check_integrity()
    assert num_idle(kv) == kv.num_blocks
