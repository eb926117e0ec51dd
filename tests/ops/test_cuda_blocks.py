"""Batches of blocks between a GPU's memory and the host's: what they hold, and in which order with steps they are made.

The emulated GPU does everything as late as is allowed, so that a wait that is missing shows every time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fastdeploy_sd.device.cuda.blocks import CopyStream, CudaBlocks
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.device_tensor import DeviceTensor
from tests.ops.cuda_device import emulated

pytestmark = pytest.mark.slow

NUM_BLOCKS = 7
Layers = list[list[npt.NDArray[Any]]]


class Cache:
    """Blocks of three layers, whose arrays hold numbers of their own, and what "steps" do to them."""

    def __init__(self, gpu: CudaDevice, width: int, num_batches: int = 2) -> None:
        rng = np.random.default_rng(width)
        shapes: list[list[tuple[int, ...]]] = [[(width,), (width, 2)], [(2 * width,)], [(width,), (width,), (33, 256)]]
        self.gpu = gpu
        self.arrays = [[rng.integers(0, 2**31, (NUM_BLOCKS, *s)).astype(np.int32) for s in layer] for layer in shapes]
        self.mirrors = [[gpu.buffer(array) for array in layer] for layer in self.arrays]
        tensors: list[list[tuple[DeviceTensor]]] = [[(mirror.tensor,) for mirror in layer] for layer in self.mirrors]
        self.blocks = CudaBlocks(gpu, tensors)
        self.lane = CopyStream(self.blocks, 3 * self.blocks.block_bytes, num_batches)
        for _ in range(2):
            self.step(0, 7)  # memory for what goes up is allocated, which waits for everything
        gpu.wait()

    def packed(self, layers: range, block_ids: list[int]) -> bytes:
        """What the host's arrays say that a batch is."""
        return b"".join(
            part[block_id].tobytes() for block_id in block_ids for layer in layers for part in self.arrays[layer]
        )

    def step(self, block_id: int, value: int) -> None:
        """Start a step that overwrites a block."""
        for layer in self.mirrors:
            for mirror in layer:
                mirror.array[block_id] = value
                mirror.upload(block_id, block_id + 1)
        self.gpu.transfers.send()

    def held(self) -> Layers:
        return [[self.gpu.read(mirror.tensor) for mirror in layer] for layer in self.mirrors]


def assert_same(got: Layers, expected: Layers) -> None:
    for layer, want in zip(got, expected, strict=True):
        for part, other in zip(layer, want, strict=True):
            assert np.array_equal(part, other)


@pytest.mark.parametrize("width", [1, 4], ids=["words", "four words"])
@pytest.mark.parametrize("layers", [range(3), range(1, 2), range(2, 3)], ids=str)
def test_blocks_go_and_come_back_in_other_places(gpu: CudaDevice, width: int, layers: range) -> None:
    cache = Cache(gpu, width)
    batch = cache.lane.batches[0]
    cache.lane.start_read(batch, layers, [5, 0, 6])
    batch.wait()
    packed = cache.packed(layers, [5, 0, 6])
    assert batch.host[: len(packed)].tobytes() == packed
    cache.lane.start_write(batch, layers, [1, -1, 5])
    assert batch.block_ids == {1, 5}
    batch.wait()
    assert batch.block_ids == frozenset()
    for layer in layers:
        for part in cache.arrays[layer]:
            part[1], part[5] = part[5].copy(), part[6].copy()
    assert_same(cache.held(), cache.arrays)


def test_every_copy_is_written_and_the_first_is_read(gpu: CudaDevice) -> None:
    """Other processes' steps, which nothing on this device's stream orders, begin when the copy is made."""
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    first, second, other = (gpu.wrap(rows + add) for add in (0, 100, 200))
    blocks = CudaBlocks(gpu, [[(first, second)], [(other,)]], are_shared=True)
    lane = CopyStream(blocks, blocks.block_bytes, 1)
    [batch] = lane.batches
    lane.start_read(batch, range(2), [1])
    batch.wait()
    assert batch.host.view(np.int32).tolist() == [4, 5, 6, 7, 204, 205, 206, 207]
    lane.start_write(batch, range(2), [2])
    lane.have_steps_follow(batch)
    found = np.empty_like(rows)
    for tensor, begin in ((first, 4), (second, 4), (other, 204)):
        # In no order with what streams have under way.
        gpu.library.call("copy", found.ctypes.data, tensor.address, ctypes.c_int64(found.nbytes))
        assert found[2].tolist() == list(range(begin, begin + 4))
    lane.close()


def read_behind_a_step(cache: Cache) -> None:
    cache.step(2, 22)
    cache.lane.follow_steps()
    [batch] = cache.lane.batches
    cache.lane.start_read(batch, range(3), [2])
    batch.wait()
    expected = cache.packed(range(3), [2])
    assert batch.host[: len(expected)].tobytes() == expected


def read_before_a_step(cache: Cache) -> None:
    expected = cache.packed(range(3), [2])
    [batch] = cache.lane.batches
    cache.lane.start_read(batch, range(3), [2])
    cache.lane.have_steps_follow(batch)
    cache.step(2, 22)
    cache.gpu.wait()
    batch.wait()
    assert batch.host[: len(expected)].tobytes() == expected


def write_behind_a_step(cache: Cache) -> None:
    cache.step(2, 22)
    cache.lane.follow_steps()
    [batch] = cache.lane.batches
    batch.host[:] = 1
    cache.lane.start_write(batch, range(3), [2])
    batch.wait()
    assert all((part[2].view(np.uint8) == 1).all() for layer in cache.held() for part in layer)


def write_before_a_step(cache: Cache) -> None:
    [batch] = cache.lane.batches
    batch.host[:] = 1
    cache.lane.start_write(batch, range(3), [2])
    cache.lane.have_steps_follow(batch)
    cache.step(2, 22)
    cache.gpu.wait()
    batch.wait()
    assert all((part[2] == 22).all() for layer in cache.held() for part in layer)


ORDERS = {
    read_behind_a_step: "follow_steps",
    read_before_a_step: "have_steps_follow",
    write_behind_a_step: "follow_steps",
    write_before_a_step: "have_steps_follow",
}


@pytest.mark.parametrize("order", ORDERS)
def test_copies_and_steps_keep_their_order(gpu: CudaDevice, order: Callable[[Cache], None]) -> None:
    order(Cache(gpu, 1, num_batches=1))


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("order", "wait"), ORDERS.items())
def test_a_wait_that_is_left_out_shows(
    monkeypatch: pytest.MonkeyPatch, order: Callable[[Cache], None], wait: str
) -> None:
    monkeypatch.setattr(CopyStream, wait, lambda *_: None)
    with pytest.raises(AssertionError):
        order(Cache(CudaDevice(emulated().device.library), 1, num_batches=1))
