"""The KV of a GPU in pages for other instances: what they hold, and when steps find what was written."""

from __future__ import annotations

import ctypes
from typing import NoReturn

import numpy as np
import pytest

from fastdeploy_sd.device.cuda.blocks import CopyStream
from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.kv_cache import KvCache
from fastdeploy_sd.worker.kv import device_pages
from fastdeploy_sd.worker.kv.device_pages import DevicePages
from fastdeploy_sd.worker.kv.kv_access import open_mover
from fastdeploy_sd.worker.kv.kv_memory import DraftLayerKv, RankKv
from tests.ops.cuda_device import emulated

pytestmark = pytest.mark.slow

NUM_BLOCKS = 6


class Kv:
    """A target's layer of int8 with scales, a draft layer with hidden rows, and their pages."""

    def __init__(self, gpu: CudaDevice) -> None:
        rng = np.random.default_rng(0)
        self.gpu = gpu
        self.arrays = [
            [rng.integers(0, 256, (NUM_BLOCKS, n)).astype(np.uint8) for n in sizes]
            for sizes in ((64, 64, 16, 16), (64, 64, 16, 16, 36))
        ]
        self.tensors = [[gpu.wrap(array) for array in layer] for layer in self.arrays]
        (k, v, ks, vs), (dk, dv, dks, dvs, hidden) = self.tensors
        draft = DraftLayerKv(range(1), KvCache(dk, dv, 0, dks, dvs), hidden)
        kv = RankKv([range(1)], [KvCache(k, v, 0, ks, vs)], {"mtp": [draft]})
        self.pages = DevicePages(gpu, [kv], is_read=True, is_written=True)

    def page(self, layer: int, block_id: int) -> bytes:
        return b"".join(part[block_id].tobytes() for part in self.arrays[layer])

    def found(self, layer: int, block_id: int) -> bytes:
        """What a step finds."""
        return b"".join(self.gpu.read(tensor)[block_id].tobytes() for tensor in self.tensors[layer])


@pytest.fixture
def kv(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> Kv:
    monkeypatch.setattr(device_pages, "_BATCH_BYTES", 400)  # two pages
    return Kv(gpu)


def test_pages_are_read_and_written_in_batches(kv: Kv) -> None:
    assert (kv.pages.num_layers, kv.pages.num_target_layers, kv.pages.num_blocks) == (2, 1, NUM_BLOCKS)
    assert [kv.pages.page_bytes(layer) for layer in range(2)] == [160, 196]
    for layer in range(2):
        [first], [second] = kv.pages.read_all(layer, [4, 1])
        assert (first.tobytes(), second.tobytes()) == (kv.page(layer, 4), kv.page(layer, 1))
        several = kv.pages.read_all(layer, [0, 5, 2, 3, 1])
        assert [page.tobytes() for [page] in several] == [kv.page(layer, block) for block in (0, 5, 2, 3, 1)]
    written = [(0, 5, 0), (0, 4, 1), (0, 3, 2), (1, 0, 5), (0, 0, 3)]
    for layer, to, origin in written:
        kv.pages.write(layer, to, memoryview(kv.page(layer, origin)))
    kv.pages.end_writes()
    assert [kv.found(layer, to) for layer, to, _ in written] == [kv.page(layer, origin) for layer, _, origin in written]
    assert kv.found(1, 1) == kv.page(1, 1)


def test_pages_that_are_not_there_are_refused(kv: Kv) -> None:
    for layer, block in ((0, NUM_BLOCKS), (0, -1), (2, 0), (-1, 0)):
        text = f"below 2 and a block below {NUM_BLOCKS}, got layer {layer}, block {block}"
        with pytest.raises(IndexError, match=text):
            kv.pages.read_all(layer, [block])
        with pytest.raises(IndexError, match=text):
            kv.pages.write(layer, block, memoryview(bytes(160)))
    with pytest.raises(ValueError, match="page of layer 1: expected 196 bytes, got 160"):
        kv.pages.write(1, 0, memoryview(bytes(160)))


def test_without_memory_for_what_is_on_its_way_the_start_ends(kv: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(CopyStream, "__init__", refuse)
    wanted = "kv_cache_memory_gb, swap_space: expected blocks on their way that .* has memory for, got no pinned memory"
    with pytest.raises(ConfigError, match=wanted):
        open_mover(kv.pages)


@pytest.mark.usefixtures("no_collection")
def test_what_a_write_waits_for_is_waited_for_before(kv: Kv) -> None:
    """Two batches of two pages: the third is put together when the copy of the first is made."""
    kv.pages.follow_steps()
    for number, is_awaited in enumerate((False, False, False, False, True, False)):
        wait = kv.pages.awaited(0)
        assert (wait is not None) == is_awaited
        if wait is not None:
            wait()
            assert kv.pages.awaited(0) is None
        kv.pages.write(0, number, memoryview(kv.page(0, number)))
    assert kv.pages.awaited(1) is not None  # another layer begins another batch
    with pytest.raises(IndexError):
        kv.pages.awaited(2)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("wait", ["have_steps_follow", "follow_steps"])
def test_a_wait_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    kv = Kv(CudaDevice(emulated().device.library))
    monkeypatch.setattr(CopyStream, wait, lambda *_: None)
    page, before = kv.page(0, 0), kv.page(0, 3)
    mirror = kv.gpu.buffer(np.zeros(4, np.int32))  # what goes up allocates memory, which waits for everything
    for _ in range(2):
        mirror.upload()
        kv.gpu.transfers.send()
    kv.gpu.wait()
    if wait == "follow_steps":
        kv.gpu.library.call("zero", kv.tensors[0][0].address, ctypes.c_int64(64 * NUM_BLOCKS), kv.gpu.stream)
        kv.pages.follow_steps()
        assert kv.pages.read_all(0, [3])[0][0].tobytes() == before  # the step comes later
    else:
        kv.pages.write(0, 3, memoryview(page))
        kv.pages.end_writes()
        assert kv.found(0, 3) == before  # the step came first
