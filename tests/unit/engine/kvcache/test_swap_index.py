"""Which slot holds what, and which one is overwritten next."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, PrefixCache
from fastdeploy_sd.engine.kvcache.swap_index import SwapIndex

ROOT = PrefixCache.root("")


def block(parent: bytes, token: int) -> CachedBlock:
    tokens = np.full(4, token, np.int32).tobytes()
    return CachedBlock(PrefixCache.chain(parent, tokens), parent, tokens)


def chain(*token_ids: int, root: bytes = ROOT) -> list[CachedBlock]:
    blocks, parent = list[CachedBlock](), root
    for token in token_ids:
        blocks.append(block(parent, token))
        parent = blocks[-1].hash
    return blocks


def put(index: SwapIndex, content: CachedBlock) -> int:
    """Store a content at once; returns its slot."""
    reserved = index.reserve(content)
    assert reserved is not None
    index.set_ready(reserved[0])
    index.unpin(reserved[0])
    index.check_integrity()
    return reserved[0]


def has(index: SwapIndex, content: CachedBlock) -> bool:
    return index.slot(content) is not None


def pin(index: SwapIndex, content: CachedBlock) -> int | None:
    slot = index.slot(content)
    if slot is not None:
        index.pin(slot)
    return slot


def test_a_content_is_found_once_its_bytes_are_there() -> None:
    index, [content] = SwapIndex(2), chain(1)
    reserved = index.reserve(content)
    assert reserved == (0, False)
    assert not has(index, content)
    index.set_ready(0)
    assert has(index, content)
    index.unpin(0)
    assert has(index, content)
    assert index.num_used_slots == 1
    assert index.reserve(content) is None  # it is there already


def test_a_slot_whose_bytes_never_came_is_free_again() -> None:
    index, [content] = SwapIndex(1), chain(1)
    assert index.reserve(content) == (0, False)
    index.unpin(0)
    index.check_integrity()
    assert not has(index, content)
    assert index.reserve(content) == (0, False)


@pytest.mark.parametrize("change", ["tokens", "parent"])
def test_an_equal_hash_is_not_believed(change: str) -> None:
    index, [content, other] = SwapIndex(2), chain(1, 2)
    put(index, content)
    tokens, parent = (other.tokens, content.parent) if change == "tokens" else (content.tokens, other.parent)
    assert not has(index, CachedBlock(content.hash, parent, tokens))
    assert has(index, content)


def test_equal_tokens_behind_another_salt_are_another_content() -> None:
    index, mine, yours = SwapIndex(4), chain(1, 2), chain(1, 2, root=PrefixCache.root("other"))
    for content in mine:
        put(index, content)
    assert [has(index, content) for content in [*mine, *yours]] == [True, True, False, False]


def test_the_chain_that_was_not_used_for_longest_is_overwritten_from_its_end() -> None:
    index, a, b = SwapIndex(4), chain(1, 2), chain(3, 4)
    for content in [*a, *b]:
        put(index, content)
    index.touch([content.hash for content in a])
    gone = []
    for token in range(10, 14):
        put(index, chain(token)[0])
        gone.append([has(index, content) for content in [*a, *b]])
    assert gone == [
        [True, True, True, False],
        [True, True, False, False],
        [True, False, False, False],
        [False, False, False, False],
    ]


def test_what_is_being_read_is_not_overwritten() -> None:
    index, [a, b, c] = SwapIndex(2), [*chain(1), *chain(2), *chain(3)]
    put(index, a)
    put(index, b)
    assert pin(index, a) == 0
    assert put(index, c) == 1
    index.check_integrity()
    assert index.reserve(b) == (1, True)
    assert index.reserve(*chain(4)) is None  # one is read, the other written
    index.unpin(0)
    assert index.reserve(*chain(4)) == (0, True)


def test_a_dropped_content_keeps_its_slot_until_the_copy_has_ended() -> None:
    index, [content] = SwapIndex(1), chain(1)
    put(index, content)
    assert pin(index, content) == 0
    assert index.drop(content.hash) == 0
    index.check_integrity()
    assert not has(index, content)
    assert index.reserve(content) is None  # there is no slot
    index.unpin(0)
    index.check_integrity()
    assert index.reserve(content) == (0, False)
    assert index.drop(content.hash) == 0
    index.set_ready(0)  # the bytes of a content that was dropped while they were written
    assert not has(index, content)
    index.unpin(0)
    assert index.num_used_slots == 0


def test_a_copy_that_ends_late_does_not_touch_a_new_one_of_the_same_content() -> None:
    index, [content] = SwapIndex(2), chain(1)
    first = index.reserve(content)
    assert first == (0, False)
    index.drop(content.hash)
    assert put(index, content) == 1
    index.unpin(0)
    index.check_integrity()
    assert has(index, content)


def test_contents_of_an_earlier_process_are_taken_over_if_their_hashes_are_right() -> None:
    index, (a, b) = SwapIndex(4), chain(1, 2)
    wrong = CachedBlock(b.hash, a.parent, b.tokens)
    index.restore([(3, a), (1, wrong), (0, a), (2, b)])
    index.check_integrity()
    assert pin(index, a) == 0  # the later of two
    assert pin(index, b) == 2
    assert index.num_used_slots == 2
    assert {put(index, chain(token)[0]) for token in (7, 8)} == {1, 3}


class Account:
    """What must be in an index: content -> last use, and the copies that are under way, over random operations."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.index = SwapIndex(self.random.randint(1, 8))
        self.ready: dict[CachedBlock, int] = {}
        self.copies: list[tuple[int, CachedBlock, bool]] = []  # slot, content, whether it is stored
        self.clock = self.num_evictions = 0

    def store(self, content: CachedBlock) -> None:
        known = {*self.ready, *(c for _, c, is_store in self.copies if is_store)}
        parents, pinned = {c.parent for c in known}, {c for _, c, _ in self.copies}
        leaves = [c for c in self.ready if c.hash not in parents and c not in pinned]
        reserved = self.index.reserve(content)
        assert content not in known or reserved is None
        if reserved is None:
            return
        self.copies.append((reserved[0], content, True))
        if reserved[1]:
            oldest = min(leaves, key=lambda c: self.ready[c])
            assert not has(self.index, oldest)
            del self.ready[oldest]
            self.num_evictions += 1

    def load(self, content: CachedBlock) -> None:
        slot = pin(self.index, content)
        assert (slot is not None) == (content in self.ready)
        if slot is not None:
            self.copies.append((slot, content, False))

    def touch(self, content: CachedBlock) -> None:
        self.clock += 1
        self.index.touch([content.hash])
        if content in self.ready:
            self.ready[content] = self.clock

    def end_copy(self, content: CachedBlock) -> None:
        del content
        if not self.copies:
            return
        slot, done, is_store = self.copies.pop(self.random.randrange(len(self.copies)))
        if is_store and self.random.random() < 0.8:
            self.index.set_ready(slot)
            self.ready[done] = 0
            self.touch(done)
        self.index.unpin(slot)


def test_slots_are_conserved_and_the_oldest_leaf_goes_first() -> None:
    num_evictions = 0
    for seed in range(60):
        account = Account(seed)
        roots = [b"%d" % i for i in range(3)]
        contents = [c for root in roots for c in chain(*[account.random.randrange(3) for _ in range(5)], root=root)]
        for _ in range(300):
            operations = (account.store, account.store, account.load, account.touch, account.end_copy)
            account.random.choice(operations)(account.random.choice(contents))
            account.index.check_integrity()
        assert {content for content in contents if has(account.index, content)} == set(account.ready)
        num_evictions += account.num_evictions
    assert num_evictions > 500
