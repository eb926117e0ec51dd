"""The thread that copies blocks: what comes back, what a cancel promises, and that it never ends by accident."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from fastdeploy_sd.engine.interfaces.block_store import CopyResult, CopyStatus, EraseSlot, LoadBlock, StoreBlock
from fastdeploy_sd.engine.kvcache.prefix_cache import CachedBlock, PrefixCache
from fastdeploy_sd.worker.kv.block_copier import BlockCopier
from fastdeploy_sd.worker.kv.block_mover import HostBlockMover
from fastdeploy_sd.worker.kv.swap_file import SwapFile

BLOCK_SIZE = 16
PAGE_BYTES = (100, 300)
DEADLINE_S = 120.0


class SlowPages:
    """Two layers over some blocks; the second page of a copy waits until a test lets it pass.

    Attributes:
        reached: set when a copy has got there. may_pass: to be set. touched: blocks in the order of their pages.
    """

    block_bytes = sum(PAGE_BYTES)

    def __init__(self, num_blocks: int) -> None:
        rng = np.random.default_rng(0)
        self.layers = [rng.integers(0, 256, (num_blocks, n)).astype(np.uint8) for n in PAGE_BYTES]
        self.reached, self.may_pass = threading.Event(), threading.Event()
        self.may_pass.set()
        self.touched: list[int] = []

    def spans(self, block_id: int) -> Iterator[tuple[npt.NDArray[np.uint8]]]:
        for layer, pages in enumerate(self.layers):
            self._wait(layer, block_id)
            yield (pages[block_id],)

    def block(self, block_id: int) -> bytes:
        return b"".join(layer[block_id].tobytes() for layer in self.layers)

    def _wait(self, layer: int, block_id: int) -> None:
        self.touched.append(block_id)
        if layer == 0:  # of two: a caller that cancels here must not see the second one touched
            self.reached.set()
            assert self.may_pass.wait(DEADLINE_S), "the copy was never let pass"


class Setup:
    """A copier over slow pages, and its results so far."""

    def __init__(self, num_blocks: int = 8, num_slots: int = 8) -> None:
        self.pages = SlowPages(num_blocks)
        self.file = SwapFile(None, {}, num_slots, sum(PAGE_BYTES), BLOCK_SIZE)
        self.copier = BlockCopier(HostBlockMover(self.pages), self.file)
        self.results: dict[int, CopyResult] = {}

    def wait(self, command_ids: Sequence[int]) -> list[CopyStatus]:
        deadline = time.monotonic() + DEADLINE_S
        while not set(command_ids) <= set(self.results):
            left_s = deadline - time.monotonic()
            assert left_s > 0, "a command has no result"
            readable, _, _ = select.select([self.copier.fd], [], [], left_s)
            assert readable, "the descriptor does not say that there are results"
            for result in self.copier.take_results():
                assert result.command_id not in self.results, "two results of a command"
                self.results[result.command_id] = result
        return [self.results[i].status for i in command_ids]


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.pages.may_pass.set()
    setup.copier.close()


def content(token: int) -> CachedBlock:
    tokens, parent = np.full(BLOCK_SIZE, token, np.int32).tobytes(), PrefixCache.root("")
    return CachedBlock(PrefixCache.chain(parent, tokens), parent, tokens)


def test_a_block_comes_back_in_another_one(setup: Setup) -> None:
    stores = [StoreBlock(i, block_id=i, slot=7 - i, content=content(i)) for i in range(4)]
    setup.copier.submit(stores)
    assert setup.wait(range(4)) == [CopyStatus.DONE] * 4
    want = [setup.pages.block(i) for i in range(4)]
    setup.copier.submit([LoadBlock(10 + i, block_id=4 + i, slot=7 - i, content=content(i)) for i in range(4)])
    assert setup.wait(range(10, 14)) == [CopyStatus.DONE] * 4
    assert [setup.pages.block(4 + i) for i in range(4)] == want
    assert setup.copier.take_results() == ()
    assert select.select([setup.copier.fd], [], [], 0)[0] == []


def test_what_is_not_there_is_damaged_and_writes_nothing(setup: Setup) -> None:
    before = setup.pages.block(0)
    setup.copier.submit([StoreBlock(1, 1, 0, content(1))])
    setup.wait([1])
    setup.copier.submit([LoadBlock(2, 0, 0, content(2)), LoadBlock(3, 2, 5, content(1))])
    assert setup.wait([2, 3]) == [CopyStatus.DAMAGED] * 2
    setup.copier.submit([EraseSlot(4, 0)])
    assert setup.wait([4]) == [CopyStatus.DONE]
    setup.copier.submit([LoadBlock(5, 0, 0, content(1))])
    assert setup.wait([5]) == [CopyStatus.DAMAGED]
    assert setup.pages.block(0) == before


@pytest.mark.parametrize("is_load", [True, False])
def test_a_cancelled_copy_touches_no_further_page(setup: Setup, is_load: bool) -> None:
    setup.copier.submit([StoreBlock(0, 1, 0, content(1))])
    setup.wait([0])
    setup.pages.reached.clear()
    setup.pages.may_pass.clear()
    setup.copier.submit([LoadBlock(1, 0, 0, content(1)) if is_load else StoreBlock(1, 0, 1, content(2))])
    assert setup.pages.reached.wait(DEADLINE_S)
    second_page = setup.pages.layers[1][0].copy()
    has_returned = threading.Event()

    def cancel() -> None:
        setup.copier.cancel([0])
        has_returned.set()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    assert not has_returned.wait(0.1), "the block is being read or written"
    setup.pages.may_pass.set()
    canceller.join(DEADLINE_S)
    assert has_returned.is_set()
    num_touched = len(setup.pages.touched)
    assert setup.wait([1]) == [CopyStatus.CANCELLED]
    assert len(setup.pages.touched) == num_touched
    assert np.array_equal(setup.pages.layers[1][0], second_page)


def test_a_copy_that_has_not_begun_is_withdrawn_at_once(setup: Setup) -> None:
    setup.pages.may_pass.clear()
    setup.copier.submit([StoreBlock(0, 0, 0, content(0))])
    assert setup.pages.reached.wait(DEADLINE_S)
    setup.copier.submit([StoreBlock(1, 1, 1, content(1)), LoadBlock(2, 2, 2, content(2))])
    setup.copier.cancel([1, 2])
    assert setup.wait([1, 2]) == [CopyStatus.CANCELLED] * 2
    setup.pages.may_pass.set()
    assert setup.wait([0]) == [CopyStatus.DONE]
    assert set(setup.pages.touched) == {0}


def test_a_load_that_is_cancelled_while_the_disk_is_read_writes_nothing(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.copier.submit([StoreBlock(0, 1, 0, content(1))])
    setup.wait([0])
    read, is_reading, may_end = setup.file.read, threading.Event(), threading.Event()

    def slow_read(slot: int, wanted: CachedBlock, data: npt.NDArray[np.uint8]) -> None:
        is_reading.set()
        assert may_end.wait(DEADLINE_S)
        read(slot, wanted, data)

    monkeypatch.setattr(setup.file, "read", slow_read)
    setup.copier.submit([LoadBlock(1, 0, 0, content(1))])
    assert is_reading.wait(DEADLINE_S)
    setup.pages.touched.clear()
    setup.copier.cancel([0])  # waits for no disk
    may_end.set()
    assert setup.wait([1]) == [CopyStatus.CANCELLED]
    assert setup.pages.touched == []


def test_loads_come_before_stores(setup: Setup) -> None:
    setup.copier.submit([StoreBlock(0, 0, 0, content(0))])
    setup.wait([0])
    setup.pages.may_pass.clear()
    setup.pages.reached.clear()
    setup.copier.submit([StoreBlock(1, 1, 1, content(1))])
    assert setup.pages.reached.wait(DEADLINE_S)
    setup.copier.submit([StoreBlock(2, 2, 2, content(2)), LoadBlock(3, 3, 0, content(0))])
    setup.pages.touched.clear()
    setup.pages.may_pass.set()
    setup.wait([1, 2, 3])
    assert setup.pages.touched == [1, 3, 3, 2, 2]


def test_a_refused_copy_is_reported_and_the_next_one_made(
    setup: Setup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(setup.file, "write", refuse)
    setup.copier.submit([StoreBlock(i, i, i, content(i)) for i in range(8)])
    assert setup.wait(range(8)) == [CopyStatus.FAILED] * 8
    monkeypatch.undo()
    setup.copier.submit([StoreBlock(9, 0, 0, content(0))])
    assert setup.wait([9]) == [CopyStatus.DONE]
    assert "StoreBlock of slot 0 failed: OSError(28, 'No space left on device')" in caplog.text


def test_the_descriptor_wakes_at_the_time_that_was_asked_for(setup: Setup) -> None:
    setup.copier.wake_after(0.01)
    assert select.select([setup.copier.fd], [], [], DEADLINE_S)[0]
    assert list(setup.copier.take_results()) == []
    assert not select.select([setup.copier.fd], [], [], 0)[0]
    setup.copier.wake_after(0.01)  # the next call counts again
    assert select.select([setup.copier.fd], [], [], DEADLINE_S)[0]


def test_closing_ends_the_threads_whatever_waits() -> None:
    before = threading.active_count()
    setup = Setup()
    setup.copier.submit([StoreBlock(i, i, i, content(i)) for i in range(8)])
    setup.copier.wake_after(3600)
    setup.copier.close()
    setup.copier.close()
    assert threading.active_count() <= before  # fewer where one that an earlier test left ends meanwhile
