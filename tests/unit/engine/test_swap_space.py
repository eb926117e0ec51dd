"""The second level by itself: what is asked for, what a load that never ends costs, and two connectors in a row."""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from fastdeploy_sd.engine.connector_chain import ConnectorChain
from fastdeploy_sd.engine.interfaces.block_store import (
    Command,
    CopyResult,
    CopyStatus,
    EraseSlot,
    LoadBlock,
    StoreBlock,
)
from fastdeploy_sd.engine.interfaces.kv_connector import SWAP, KvArrival
from fastdeploy_sd.engine.kvcache.block_table import NO_BLOCK, BlockTable
from fastdeploy_sd.engine.kvcache.manager import KVCacheManager
from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock
from fastdeploy_sd.engine.kvcache.state_cache import StateCache
from fastdeploy_sd.engine.swap_space import SwapSpace
from fastdeploy_sd.types import I32, NO_STATE, Request
from fastdeploy_sd.types.kv_groups import KvGroup
from tests.doubles.engines import toy_request

BLOCK = 4
TOKENS = np.arange(17, dtype=np.int32)


class ListedStore:
    """Copies nothing; a test says how each order ends.

    Attributes:
        orders: that have not ended. cancelled: blocks.
    """

    num_slots, block_bytes, num_state_pieces, fd = 8, 1, 3, -1

    def __init__(self, kept: Sequence[tuple[int, CachedBlock]] = ()) -> None:
        self.orders: list[Command] = []
        self.cancelled: list[int] = []
        self._kept, self._results = kept, list[CopyResult]()

    def kept(self) -> Sequence[tuple[int, CachedBlock]]:
        return self._kept

    def submit(self, commands: Sequence[Command]) -> None:
        self.orders += commands

    def cancel(self, block_ids: Sequence[int]) -> None:
        self.cancelled += block_ids

    def take_results(self) -> list[CopyResult]:
        results, self._results = self._results, []
        return results

    def wake_after(self, seconds: float) -> None:
        """The tests look by themselves."""

    def end(self, *kinds: type, status: CopyStatus = CopyStatus.DONE) -> None:
        """End all orders of these kinds in the same way."""
        ended = [order for order in self.orders if isinstance(order, kinds)]
        self.orders = [order for order in self.orders if order not in ended]
        self._results += [CopyResult(order.command_id, status, 0.5) for order in ended]


class Level:
    """A first level of 8 blocks with a second one, in which 16 tokens of a request lie; the first has lost them."""

    def __init__(self, load_deadline_s: float = 60.0, groups: Sequence[KvGroup] = (KvGroup(BLOCK),)) -> None:
        self.kv = KVCacheManager(8 * len(groups), groups, enable_prefix_caching=True)
        self.store = ListedStore()
        self.swap = SwapSpace(self.kv, self.store, load_deadline_s)
        first = self.admit("first", TOKENS)
        self.kv.publish(first, TOKENS, 16)
        self.store.end(StoreBlock)
        self.swap.arrivals()
        self.kv.free(first)
        self.kv.free(self.admit("filler", np.arange(100, 132, dtype=np.int32)))
        assert self.kv.num_cached_blocks == 0

    def admit(self, name: str, tokens: I32) -> BlockTable:
        table = BlockTable(name)
        assert self.kv.admit(table, self.kv.match_prefix(table, tokens, len(tokens)), len(tokens))
        return table

    def begin(self, name: str = "again") -> BlockTable:
        table = self.admit(name, TOKENS)
        assert self.swap.begin(toy_request(name, TOKENS), TOKENS, 0, table.block_ids)
        self.swap.check_integrity()
        return table


def test_a_request_arrives_when_the_last_of_its_blocks_has_come() -> None:
    level = Level()
    table = level.begin()
    assert [(o.block_id, type(o)) for o in level.store.orders if not isinstance(o, EraseSlot)] == [
        (block_id, LoadBlock) for block_id in table.block_ids[:4]
    ]
    assert list(level.swap.arrivals()) == []
    last = level.store.orders.pop()
    level.store.end(LoadBlock)
    assert list(level.swap.arrivals()) == []
    level.store.orders.append(last)
    level.store.end(LoadBlock)
    assert list(level.swap.arrivals()) == [KvArrival("again", 16, origins={SWAP: 16})]
    assert level.swap.stats().load_seconds == 2.0
    level.swap.check_integrity()


@pytest.mark.parametrize("status", [CopyStatus.DONE, CopyStatus.DAMAGED])
def test_of_a_window_only_the_end_is_loaded_and_without_it_nothing_is_of_use(status: CopyStatus) -> None:
    level = Level(groups=(KvGroup(BLOCK), KvGroup(BLOCK, 6, 32)))
    table = level.begin()
    full, window = table.groups
    assert window.block_ids[:2] == [NO_BLOCK] * 2
    loads = [o.block_id for o in level.store.orders if isinstance(o, LoadBlock)]
    assert loads == [*full.block_ids[:4], *window.block_ids[2:4]]
    last = level.store.orders.pop()
    level.store.end(LoadBlock)
    level.store.orders.append(last)
    level.store.end(LoadBlock, status=status)
    [arrival] = level.swap.arrivals()
    assert arrival == (
        KvArrival("again", 16, origins={SWAP: 16}) if status is CopyStatus.DONE else KvArrival("again", 0, is_lost=True)
    )
    level.swap.check_integrity()


class StateLevel(Level):
    """The same for a model with recurrent states: two snapshots of three pieces, which begin after the 8 blocks."""

    def __init__(self) -> None:
        self.kv = KVCacheManager(8, (KvGroup(BLOCK),), enable_prefix_caching=True, num_snapshots=2)
        self.store = ListedStore()
        self.store.num_slots = 32
        self.swap = SwapSpace(self.kv, self.store)
        self.step("first", TOKENS)

    def step(self, name: str, tokens: I32) -> None:
        """Run a request to its end, and store what it had if all is stored at once."""
        table = self.admit(name, tokens)
        self.states.plan([table], [0], [len(tokens)])
        self.kv.publish(table, tokens, len(tokens) - 1)
        self.states.publish(table, tokens, len(tokens) - 1)
        self.kv.free(table)
        self.kv.check_integrity()
        self.swap.check_integrity()

    def push_out(self) -> None:
        self.store.end(StoreBlock)
        self.swap.arrivals()
        for i in range(2):
            self.step(f"filler {i}", np.arange(100 + 40 * i, 133 + 40 * i, dtype=np.int32)[:29])

    @property
    def states(self) -> StateCache:
        assert self.kv.states is not None
        return self.kv.states


def test_a_snapshot_is_copied_in_pieces_until_its_place_is_given_away() -> None:
    level = StateLevel()
    stores = [order for order in level.store.orders if isinstance(order, StoreBlock)]
    assert [order.block_id for order in stores] == [0, 1, 2, 3, 8, 9, 10]
    for before, piece in itertools.pairwise(stores[3:]):
        assert piece.content.parent == before.content.hash
    level.step("second", np.arange(100, 105, dtype=np.int32))
    assert not {8, 9, 10} & set(level.store.cancelled)
    level.step("third", np.arange(200, 205, dtype=np.int32))
    assert {8, 9, 10} <= set(level.store.cancelled)


@pytest.mark.parametrize("status", [CopyStatus.DONE, CopyStatus.DAMAGED, CopyStatus.FAILED])
def test_blocks_are_of_use_with_all_pieces_of_a_snapshot(status: CopyStatus) -> None:
    level = StateLevel()
    level.push_out()
    level.store.end(StoreBlock, status=CopyStatus.CANCELLED)
    level.swap.arrivals()
    table = level.begin()
    loads = [order for order in level.store.orders if isinstance(order, LoadBlock)]
    begin = 8 + 3 * table.states.arriving
    assert [order.block_id for order in loads] == [*table.block_ids[:4], begin, begin + 1, begin + 2]
    level.store.orders = [*loads[:-1]]
    level.store.end(LoadBlock)
    assert list(level.swap.arrivals()) == []
    level.store.orders = [loads[-1]]
    level.store.end(LoadBlock, status=status)
    [arrival] = level.swap.arrivals()
    is_there = status is CopyStatus.DONE
    assert arrival == KvArrival("again", 16 * is_there, origins={SWAP: 16} if is_there else {})
    assert table.states.source == ((begin - 8) // 3 if is_there else NO_STATE)
    level.kv.publish(table, TOKENS, arrival.num_tokens)
    level.kv.check_integrity()
    level.kv.free(table)
    level.kv.check_integrity()
    assert level.kv.match_prefix(BlockTable("next"), TOKENS, 17).num_tokens == arrival.num_tokens


def test_an_aborted_load_gives_the_snapshots_place_back() -> None:
    level = StateLevel()
    level.push_out()
    table = level.begin()
    pieces = set(range(8 + 3 * table.states.arriving, 11 + 3 * table.states.arriving))
    level.swap.cancel("again")
    assert pieces <= set(level.store.cancelled)
    level.kv.free(table)
    level.kv.check_integrity()
    level.swap.check_integrity()


@pytest.mark.parametrize("status", [CopyStatus.DAMAGED, CopyStatus.FAILED])
def test_blocks_behind_one_that_did_not_come_are_not_used(status: CopyStatus) -> None:
    level = Level()
    level.begin()
    others = [level.store.orders.pop(i) for i in (3, 1, 0)]
    level.store.end(LoadBlock, status=status)
    level.store.orders += others
    level.store.end(LoadBlock)
    assert list(level.swap.arrivals()) == [KvArrival("again", 8, origins={SWAP: 8})]
    assert [type(order) for order in level.store.orders] == [EraseSlot]  # it is not tried again
    level.swap.check_integrity()


def test_who_waits_for_too_long_goes_on_with_what_has_come() -> None:
    level = Level(load_deadline_s=0.0)
    table = level.begin()
    late = level.store.orders[2:]
    del level.store.orders[2:]
    level.store.end(LoadBlock)
    assert list(level.swap.arrivals()) == [KvArrival("again", 8, origins={SWAP: 8})]
    assert level.store.cancelled == table.block_ids[:4]
    assert level.swap.stats().num_late == 1
    level.store.orders += late
    level.store.end(LoadBlock)  # no request needs it any more
    assert list(level.swap.arrivals()) == []
    level.swap.check_integrity()


def test_who_begins_again_does_not_get_what_was_on_its_way_before() -> None:
    level = Level()
    level.kv.free(level.begin())
    level.swap.cancel("again")
    old = level.store.orders[:]
    level.store.orders.clear()
    level.begin()
    new = level.store.orders[:]
    level.store.orders[:] = old
    level.store.end(LoadBlock)
    assert list(level.swap.arrivals()) == []
    level.store.orders[:] = new
    level.store.end(LoadBlock, status=CopyStatus.CANCELLED)
    assert list(level.swap.arrivals()) == [KvArrival("again", 0)]


def test_what_is_suspect_is_erased_at_both_levels() -> None:
    level = Level()
    table = level.admit("failing", TOKENS)
    level.kv.publish(table, TOKENS, 16)
    level.kv.free(table, discard=True)
    assert sorted(order.slot for order in level.store.orders) == [0, 1, 2, 3]
    assert all(isinstance(order, EraseSlot) for order in level.store.orders)
    again = level.admit("again", TOKENS)
    assert not level.swap.begin(toy_request("again", TOKENS), TOKENS, 0, again.block_ids)


class OneConnector:
    """A connector that makes every request wait, or none, and arrives when told."""

    def __init__(self, *, waits: bool) -> None:
        self.fd: int | None = os.eventfd(0, os.EFD_CLOEXEC)
        self.waits, self.calls = waits, list[tuple[str, str, int]]()
        self.arrived: list[KvArrival] = []

    def begin(self, request: Request, token_ids: I32, num_cached_tokens: int, block_ids: Sequence[int]) -> bool:
        assert (len(token_ids), list(block_ids)) == (17, [1, 2, 3, 4, 5])
        self.calls.append(("begin", request.request_id, num_cached_tokens))
        return self.waits

    def cancel(self, request_id: str) -> None:
        self.calls.append(("cancel", request_id, 0))

    def arrivals(self) -> list[KvArrival]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None:
        assert self.fd is not None
        os.close(self.fd)


@pytest.fixture
def connectors() -> Iterator[tuple[OneConnector, OneConnector]]:
    first, second = OneConnector(waits=True), OneConnector(waits=True)
    yield first, second
    first.close()
    second.close()


def test_the_second_connector_brings_what_the_first_did_not(connectors: tuple[OneConnector, OneConnector]) -> None:
    first, second = connectors
    chain = ConnectorChain(first, second)
    assert chain.begin(toy_request("a", TOKENS), TOKENS, 0, [1, 2, 3, 4, 5])
    assert second.calls == []
    first.arrived = [KvArrival("a", 8, origins={SWAP: 8})]
    assert chain.arrivals() == []
    assert second.calls == [("begin", "a", 8)]
    second.arrived = [KvArrival("a", 16, (3,), True, {"elsewhere": 8})]
    assert chain.arrivals() == [KvArrival("a", 16, (3,), True, {SWAP: 8, "elsewhere": 8})]


def test_each_is_told_of_the_end_of_those_that_wait_for_it(connectors: tuple[OneConnector, OneConnector]) -> None:
    first, second = connectors
    chain = ConnectorChain(first, second)
    for name in ("a", "b"):
        assert chain.begin(toy_request(name, TOKENS), TOKENS, 0, [1, 2, 3, 4, 5])
    first.arrived = [KvArrival("a", 4)]
    assert chain.arrivals() == []
    chain.cancel("a")
    chain.cancel("b")
    assert (first.calls[-1], second.calls[-1]) == (("cancel", "b", 0), ("cancel", "a", 0))
    second.waits = False
    assert chain.begin(toy_request("c", TOKENS), TOKENS, 0, [1, 2, 3, 4, 5])
    first.arrived = [KvArrival("c", 12)]
    assert chain.arrivals() == [KvArrival("c", 12)]


@pytest.mark.parametrize("which", [0, 1])
def test_either_one_wakes_whoever_waits_for_both(connectors: tuple[OneConnector, OneConnector], which: int) -> None:
    chain, fd = ConnectorChain(*connectors), connectors[which].fd
    assert chain.fd is not None
    assert fd is not None
    assert select.select([chain.fd], [], [], 0)[0] == []
    os.eventfd_write(fd, 1)
    assert select.select([chain.fd], [], [], 60)[0] == [chain.fd]
    os.eventfd_read(fd)
    assert select.select([chain.fd], [], [], 0)[0] == []
