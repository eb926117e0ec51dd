"""A BlockCopier over a GPU's blocks: what it promises about steps that are started while it copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np
import pytest

from fastdeploy_sd.device.cuda.blocks import CopyStream, StagedBatch
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.engine.interfaces.block_store import CopyStatus, EraseSlot, LoadBlock, StoreBlock
from fastdeploy_sd.errors import DeviceLost, InternalError
from fastdeploy_sd.worker.kv.block_copier import BlockCopier
from fastdeploy_sd.worker.kv.block_mover import DeviceBlockMover
from fastdeploy_sd.worker.kv.swap_file import SwapFile
from tests.ops.cuda_device import emulated
from tests.ops.test_cuda_blocks import Cache
from tests.unit.worker.test_block_copier import BLOCK_SIZE, DEADLINE_S, Setup, content

pytestmark = pytest.mark.slow


class DeviceSetup(Setup):
    """A copier over a cache, whose copies to the host the GPU makes when a test lets it, or what follows them does."""

    def __init__(self, gpu: CudaDevice, patch: pytest.MonkeyPatch) -> None:
        self.cache = Cache(gpu, 1)
        self.mover = DeviceBlockMover(self.cache.blocks)
        self.file = SwapFile(None, {}, 8, self.mover.block_bytes, BLOCK_SIZE)
        self.copier = BlockCopier(self.mover, self.file)
        self.results = {}
        self.is_started, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        wait = StagedBatch.wait

        def late(batch: StagedBatch) -> None:
            if batch.block_ids:
                self.is_started.set()
                assert self.may_end.wait(DEADLINE_S)
            wait(batch)

        patch.setattr(StagedBatch, "wait", late)

    def block(self, block_id: int) -> bytes:
        """What a step finds in a block now."""
        return b"".join(part[block_id].tobytes() for layer in self.cache.held() for part in layer)


@pytest.fixture
def setup(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceSetup]:
    setup = DeviceSetup(gpu, monkeypatch)
    yield setup
    setup.may_end.set()
    setup.copier.close()


def overwrite_a_block_that_is_stored(setup: DeviceSetup) -> None:
    expected = setup.cache.packed(range(3), [2])
    setup.may_end.clear()
    setup.copier.submit([StoreBlock(0, 2, 5, content(2))])
    assert setup.is_started.wait(DEADLINE_S)
    setup.copier.cancel([2])
    setup.cache.step(2, 99)
    setup.cache.gpu.wait()
    setup.may_end.set()
    assert setup.wait([0]) == [CopyStatus.DONE]
    row = np.empty(setup.mover.block_bytes, np.uint8)
    setup.file.read(5, content(2), row)
    assert row.tobytes() == expected


def store_a_block_that_a_step_writes(setup: DeviceSetup) -> None:
    setup.cache.step(2, 99)
    setup.copier.submit([StoreBlock(0, 2, 5, content(2))])
    assert setup.wait([0]) == [CopyStatus.DONE]
    row = np.empty(setup.mover.block_bytes, np.uint8)
    setup.file.read(5, content(2), row)
    assert row.tobytes() == setup.cache.packed(range(3), [2])


def read_a_block_that_is_loaded(setup: DeviceSetup) -> None:
    expected = setup.cache.packed(range(3), [2])
    setup.copier.submit([StoreBlock(0, 2, 5, content(2))])
    setup.wait([0])
    setup.copier.submit([LoadBlock(1, 4, 5, content(2))])
    assert setup.wait([1]) == [CopyStatus.DONE]
    assert setup.block(4) == expected


def overwrite_a_block_that_was_to_be_loaded(setup: DeviceSetup) -> None:
    setup.copier.submit([StoreBlock(0, 2, 5, content(2))])
    setup.wait([0])
    setup.copier.submit([LoadBlock(1, 4, 5, content(2))])
    setup.copier.cancel([4])  # before, while or after the copy is started
    setup.cache.step(4, 99)
    assert setup.wait([1])[0] in (CopyStatus.DONE, CopyStatus.CANCELLED)
    setup.cache.gpu.wait()
    assert setup.block(4) == setup.cache.packed(range(3), [4])


WAITS = {
    overwrite_a_block_that_is_stored: "have_steps_follow",
    store_a_block_that_a_step_writes: "follow_steps",
    read_a_block_that_is_loaded: "have_steps_follow",
}


@pytest.mark.parametrize("case", [*WAITS, overwrite_a_block_that_was_to_be_loaded])
def test_steps_and_copies_do_not_meet(setup: DeviceSetup, case: Callable[[DeviceSetup], None]) -> None:
    case(setup)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("case", "wait"), WAITS.items())
def test_a_wait_that_is_left_out_shows(
    monkeypatch: pytest.MonkeyPatch, case: Callable[[DeviceSetup], None], wait: str
) -> None:
    setup = DeviceSetup(CudaDevice(emulated().device.library), monkeypatch)
    monkeypatch.setattr(CopyStream, wait, lambda *_: None)
    try:
        with pytest.raises(AssertionError):
            case(setup)
    finally:
        setup.may_end.set()
        setup.copier.close()


def test_many_blocks_are_few_copies(setup: DeviceSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are ordered while a batch is under way are the next one, in all layers."""
    starts: list[int] = []
    start = CopyStream.start_read

    def noted(lane: CopyStream, batch: StagedBatch, layers: range, block_ids: list[int]) -> None:
        starts.append(len(block_ids))
        start(lane, batch, layers, block_ids)

    monkeypatch.setattr(CopyStream, "start_read", noted)
    setup.may_end.clear()
    setup.copier.submit([StoreBlock(0, 0, 0, content(0))])
    assert setup.is_started.wait(DEADLINE_S)
    setup.copier.submit([StoreBlock(i, i, i, content(i)) for i in range(1, 7)])
    setup.copier.cancel([3])
    setup.may_end.set()
    done, gone = CopyStatus.DONE, CopyStatus.CANCELLED
    assert setup.wait(range(7)) == [done, done, done, gone, done, done, done]
    assert starts == [1, 5]


def test_a_lost_device_ends_the_engine(setup: DeviceSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> NoReturn:
        raise DeviceLost("the GPU has failed")

    monkeypatch.setattr(CopyStream, "start_read", lose)
    setup.copier.submit([StoreBlock(0, 0, 0, content(0))])
    with pytest.raises(InternalError, match="the GPU has failed"):
        setup.wait([0])
    # What fails behind it, and otherwise, is no way back.
    erased = threading.Event()

    def erase(_: SwapFile, slot: int) -> None:
        if slot == 1:
            raise OSError("no disk")
        erased.set()

    monkeypatch.setattr(SwapFile, "erase", erase)
    setup.copier.submit([EraseSlot(1, 1), EraseSlot(2, 2)])
    assert erased.wait(DEADLINE_S)
    with pytest.raises(InternalError, match="the GPU has failed"):
        setup.copier.take_results()
    monkeypatch.setattr(CopyStream, "follow_steps", lose)
    with pytest.raises(InternalError, match="the GPU has failed"):
        setup.copier.submit([StoreBlock(3, 1, 1, content(1))])
