from __future__ import annotations

import random

import numpy as np
import pytest

from fastdeploy_sd.engine.kvcache.block_table import NO_MATCH, BlockTable
from fastdeploy_sd.engine.kvcache.manager import KVCacheManager
from fastdeploy_sd.engine.kvcache.prefix_cache import PrefixCache
from fastdeploy_sd.types import I32
from fastdeploy_sd.types.kv_groups import KvGroup

BLOCK = 4


def make(num_blocks: int = 8, *, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, [KvGroup(BLOCK)], enable_prefix_caching=enable_prefix_caching)


def tokens(*token_ids: int) -> I32:
    return np.array(token_ids, np.int32)


COUNTING = np.arange(100, dtype=np.int32)


def admit(kv: KVCacheManager, name: str, token_ids: I32, *, salt: str = "", computed: int | None = None) -> BlockTable:
    """Admit a request with these tokens and publish what was computed of them."""
    table = BlockTable(name, salt)
    assert kv.admit(table, kv.match_prefix(table, token_ids, len(token_ids)), len(token_ids))
    kv.publish(table, token_ids, len(token_ids) if computed is None else computed)
    kv.check_integrity()
    return table


def num_matched(kv: KVCacheManager, token_ids: I32, salt: str = "") -> int:
    return kv.match_prefix(BlockTable("probe", salt), token_ids, len(token_ids)).num_tokens


def test_a_table_grows_as_far_as_there_are_blocks() -> None:
    kv = make(4)
    table = admit(kv, "a", COUNTING[:5], computed=0)
    kv.extend_as_far_as_possible(table, 7)
    assert table.num_slots == 8
    kv.extend_as_far_as_possible(table, 11)
    assert table.num_slots == 12
    kv.extend_as_far_as_possible(table, 100)
    assert table.num_slots == 16
    kv.extend_as_far_as_possible(table, 100)
    assert table.num_slots == 16
    kv.check_integrity()


@pytest.mark.parametrize("seed", range(40))
def test_what_would_fit_without_some_tables_is_what_fits_then(seed: int) -> None:
    rng = random.Random(seed)
    kv, tables = make(rng.randint(6, 14)), list[BlockTable]()
    for i in range(4):
        text = np.array([*COUNTING[: rng.choice([0, 4, 8])], *rng.sample(range(100, 200), rng.randint(1, 9))], np.int32)
        table = BlockTable(f"r{i}")
        if kv.admit(table, kv.match_prefix(table, text, len(text)), len(text)):
            kv.publish(table, text, len(text))
            tables.append(table)
    if tables and rng.random() < 0.5:
        kv.free(tables.pop(0))  # its full blocks stay to be found
    victims = tables[rng.randint(0, len(tables)) :]
    text, probe = np.array([*COUNTING[:8], *range(200, 200 + rng.randint(1, 30))], np.int32), BlockTable("probe")
    would_fit = kv.fits_without(victims, kv.match_prefix(probe, text, len(text)), len(text))
    for table in victims:
        kv.free(table)
    assert kv.admit(probe, kv.match_prefix(probe, text, len(text)), len(text)) == would_fit
    kv.check_integrity()


def test_a_request_gets_blocks_for_its_tokens_and_grows_by_whole_blocks() -> None:
    kv = make()
    table = admit(kv, "a", COUNTING[:5])
    assert (len(table.block_ids), table.num_slots) == (2, 8)
    assert kv.extend(table, 8)
    assert len(table.block_ids) == 2
    assert kv.extend(table, 9)
    assert (len(table.block_ids), table.num_slots) == (3, 12)
    kv.check_integrity()


def test_a_failed_reservation_changes_nothing() -> None:
    kv = make(3)
    table = admit(kv, "a", COUNTING[:5])
    assert not kv.extend(table, 13)
    assert len(table.block_ids) == 2
    assert not kv.admit(BlockTable("b"), NO_MATCH, 5)
    assert kv.num_free_blocks == 1
    kv.check_integrity()


@pytest.mark.parametrize(("num_prompt", "expected"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (14, 12)])
def test_a_prefix_hit_is_whole_blocks_and_leaves_one_token_to_compute(num_prompt: int, expected: int) -> None:
    kv = make()
    admit(kv, "a", COUNTING[:12])
    assert num_matched(kv, COUNTING[:num_prompt]) == expected


def test_only_computed_full_blocks_are_published() -> None:
    kv = make()
    table = admit(kv, "a", COUNTING[:12], computed=7)
    assert num_matched(kv, COUNTING[:12]) == 4
    kv.publish(table, COUNTING, 8)
    assert num_matched(kv, COUNTING[:12]) == 8


def test_a_shared_prefix_is_held_once_and_outlives_its_owner() -> None:
    kv = make()
    first = admit(kv, "a", COUNTING[:10])
    second = admit(kv, "b", np.append(COUNTING[:8], tokens(50, 51)))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    kv.free(first)
    kv.check_integrity()
    assert num_matched(kv, COUNTING[:10]) == 8
    kv.free(second)
    kv.check_integrity()
    assert (kv.num_cached_blocks, kv.num_free_blocks) == (2, 6)
    assert num_matched(kv, COUNTING[:10]) == 8


def test_a_salt_separates_tenants() -> None:
    kv = make()
    admit(kv, "a", COUNTING[:9], salt="one")
    assert num_matched(kv, COUNTING[:9], salt="one") == 8
    assert num_matched(kv, COUNTING[:9], salt="two") == 0
    assert num_matched(kv, COUNTING[:9]) == 0


def test_an_evicted_block_is_not_found_and_a_chain_is_evicted_from_its_end() -> None:
    kv = make(4)
    kv.free(admit(kv, "a", COUNTING[:12]))
    admit(kv, "b", tokens(90, 91, 92, 93, 94))
    assert num_matched(kv, COUNTING[:13]) == 8


def test_a_match_is_not_evicted_by_its_own_admission() -> None:
    kv = make(4)
    kv.free(admit(kv, "a", COUNTING[:12]))
    table = BlockTable("b")
    match = kv.match_prefix(table, COUNTING, 14)
    assert match.num_tokens == 12
    assert not kv.admit(table, match, 17), "3 matched and 2 new blocks do not fit into 4"
    assert kv.admit(table, match, 16)
    assert table.block_ids[:3] == list(match.block_ids[0])
    kv.check_integrity()


def test_a_refusal_lasts_until_a_block_is_released_or_the_prefix_grows() -> None:
    kv = make(5)
    running, waiting = admit(kv, "a", COUNTING[:11], computed=4), BlockTable("b")
    assert not kv.is_still_refused(waiting), "never tried"
    assert not kv.admit(waiting, kv.match_prefix(waiting, COUNTING, 16), 16)
    assert kv.is_still_refused(waiting)
    assert kv.extend(running, 13)
    assert kv.is_still_refused(waiting)
    kv.publish(running, COUNTING, 8)
    assert not kv.is_still_refused(waiting), "its second block is cached now"
    assert not kv.admit(waiting, kv.match_prefix(waiting, COUNTING, 16), 16)
    assert kv.is_still_refused(waiting)
    kv.free(running)
    assert not kv.is_still_refused(waiting)
    assert kv.admit(waiting, kv.match_prefix(waiting, COUNTING, 16), 16)
    assert not kv.is_still_refused(waiting)


def test_whoever_is_still_refused_would_be_refused_again() -> None:
    num_skipped = 0
    for seed in range(60):
        rng, kv = random.Random(seed), make(10)
        texts = [np.array([rng.randrange(2) for _ in range(4)], np.int32).repeat(8) for _ in range(3)]
        running: list[tuple[BlockTable, I32, int]] = []
        waiting, text, length = BlockTable("waits"), texts[0], rng.randint(8, 30)
        for number in range(80):
            if running and rng.random() < 0.3:
                kv.free(running.pop(rng.randrange(len(running)))[0])
            elif running and rng.random() < 0.5:
                table, tokens_of_it, n = rng.choice(running)
                kv.extend_as_far_as_possible(table, n + 4)
                kv.publish(table, tokens_of_it, min(n + 4, table.num_slots, len(tokens_of_it)))
            else:
                table, tokens_of_it, n = BlockTable(f"r{number}"), rng.choice(texts), rng.randint(1, 24)
                if kv.admit(table, kv.match_prefix(table, tokens_of_it, n), n):
                    running.append((table, tokens_of_it, n))
            is_refused = kv.is_still_refused(waiting)
            num_skipped += is_refused
            if kv.admit(waiting, kv.match_prefix(waiting, text, length), length):
                assert not is_refused
                kv.free(waiting)
            kv.check_integrity()
    assert num_skipped > 100


def test_discarded_blocks_are_not_found_even_while_shared() -> None:
    kv = make()
    suspect = admit(kv, "a", COUNTING[:12])
    sharer = admit(kv, "b", COUNTING[:9])
    kv.free(suspect, discard=True)
    kv.check_integrity()
    assert num_matched(kv, COUNTING[:12]) == 0
    kv.free(sharer)
    assert kv.num_free_blocks == 8


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    kv = make(enable_prefix_caching=False)
    kv.free(admit(kv, "a", COUNTING[:12]))
    assert num_matched(kv, COUNTING[:12]) == 0
    assert kv.num_cached_blocks == 0


def test_no_block_is_hashed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    chain = PrefixCache.chain

    def noted(parent: bytes, data: bytes) -> bytes:
        hashed.append(data)
        return chain(parent, data)

    monkeypatch.setattr(PrefixCache, "chain", staticmethod(noted))
    kv, table = make(), BlockTable("a")
    for _ in range(3):  # admitted, preempted, admitted again
        assert kv.admit(table, kv.match_prefix(table, COUNTING, 16), 16)
        for num_computed in range(1, 17):
            kv.publish(table, COUNTING, num_computed)
        kv.free(table)
    assert len(hashed) == 4


def test_integrity_notices_an_early_publication() -> None:
    kv = make()
    table = admit(kv, "a", COUNTING[:12])
    table.groups[0].num_published = 1
    with pytest.raises(AssertionError, match="published too early"):
        kv.check_integrity()


def test_integrity_notices_a_block_off_the_chain() -> None:
    kv = make()
    table = admit(kv, "a", COUNTING[:12])
    table.block_ids[:2] = table.block_ids[1::-1]
    with pytest.raises(AssertionError, match="off the chain"):
        kv.check_integrity()


def test_random_walk_finds_exactly_the_published_prefixes() -> None:
    """With room for everything, a match is the longest published prefix of the same salt."""
    rng = random.Random(1)
    kv, published = make(400), set[tuple[str, tuple[int, ...]]]()
    for i in range(120):
        token_ids = np.array([rng.randrange(2) for _ in range(rng.randint(1, 20))], np.int32)
        salt = rng.choice(["", "x"])
        expected = 0
        while expected + BLOCK < len(token_ids) and (salt, tuple(token_ids[: expected + BLOCK].tolist())) in published:
            expected += BLOCK
        assert num_matched(kv, token_ids, salt) == expected
        computed = rng.randint(expected, len(token_ids))
        table = admit(kv, f"r{i}", token_ids, salt=salt, computed=computed)
        for end in range(BLOCK, computed + 1, BLOCK):
            published.add((salt, tuple(token_ids[:end].tolist())))
        if rng.random() < 0.5:
            kv.free(table)
        kv.check_integrity()
