"""Windows in a GPU's memory: who may open them, when they are freed, and what is done where there can be none."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from fastdeploy_sd.disaggregation.transfer.events import Fetched
from fastdeploy_sd.disaggregation.transfer.messages import Receiver
from fastdeploy_sd.disaggregation.transports import cuda as transport_cuda
from fastdeploy_sd.disaggregation.transports.cuda import CudaReceiver, CudaSender, forget_windows
from fastdeploy_sd.disaggregation.transports.ipc import DescriptorInbox
from fastdeploy_sd.disaggregation.transports.transport import TransportError
from fastdeploy_sd.errors import DeviceLost
from tests.splitwise.instances import PrefillEngine, connectors, request, source_of, wait_for

pytestmark = pytest.mark.slow

NUM_SLOTS, SLOT_BYTES = 4, 64


@dataclass(eq=False)
class FakeWindow:
    address: int
    num_bytes: int


class FakePort:
    """Windows that nothing is behind; with `refuses`, not even those, or no end of what is under way."""

    unit_bytes = 16

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.made: list[weakref.ref[FakeWindow]] = []

    def make_window(self, num_bytes: int) -> tuple[FakeWindow, bytes]:
        if self.refuses == "make":
            raise ValueError("no memory")
        window = FakeWindow(4096, num_bytes)
        self.made.append(weakref.ref(window))
        return window, b"handle"

    def open_window(self, handle: bytes, num_bytes: int) -> FakeWindow:
        if self.refuses == "open" or handle != b"handle":
            raise ValueError(f"{handle!r}, which is not ours")
        return FakeWindow(8192, num_bytes)

    def send(self, layer: int, block_ids: Sequence[int], places: Sequence[int]) -> None:
        raise AssertionError("pages of no device")

    def write_from(self, layer: int, block_id: int, place: int) -> None:
        raise AssertionError("pages of no device")

    def finish(self) -> None:
        if self.refuses == "finish":
            raise DeviceLost("the GPU has failed")


@pytest.fixture
def inbox() -> Iterator[DescriptorInbox]:
    made = DescriptorInbox()
    yield made
    made.close()
    forget_windows()
    assert not transport_cuda._lent


def is_there(port: FakePort, number: int = 0) -> bool:
    gc.collect()
    return port.made[number]() is not None


def test_a_window_is_freed_when_nobody_has_it_open(inbox: DescriptorInbox) -> None:
    port = FakePort()
    receiver = CudaReceiver(NUM_SLOTS, SLOT_BYTES, port)
    receiver.hand_over(inbox.name)
    sender = CudaSender(inbox.take(receiver.offer.token), receiver.offer, FakePort())
    page = receiver.page(3, 60, None)
    assert page is not None
    assert (page.address, page.nbytes) == (4096 + 3 * SLOT_BYTES, 60)
    for slot, num_bytes in ((NUM_SLOTS, 60), (-1, 60), (0, SLOT_BYTES + 1)):
        assert receiver.page(slot, num_bytes, None) is None
    receiver.close()
    del receiver
    forget_windows()
    assert is_there(port)  # the sender may still write to it
    sender.close()
    forget_windows()
    assert not is_there(port)


def test_a_window_that_is_closed_late_is_freed_without_another_receiver(inbox: DescriptorInbox) -> None:
    """As where an instance was suspended when it was given up."""
    port = FakePort()
    receiver = CudaReceiver(NUM_SLOTS, SLOT_BYTES, port)
    receiver.hand_over(inbox.name)
    sender = CudaSender(inbox.take(receiver.offer.token), receiver.offer, FakePort())
    receiver.close()
    del receiver
    with connectors():
        assert is_there(port)
        sender.close()
        wait_for(lambda: port.made[0]() is None, "the window to be freed")


def test_windows_that_are_still_open_elsewhere_are_few(inbox: DescriptorInbox) -> None:
    port = FakePort()
    for _ in range(transport_cuda._MAX_LENT):
        receiver = CudaReceiver(NUM_SLOTS, SLOT_BYTES, port)
        receiver.hand_over(inbox.name)
        receiver.close()
    with pytest.raises(TransportError, match="4 windows of lost instances are still open there"):
        CudaReceiver(NUM_SLOTS, SLOT_BYTES, port)
    inbox.close()  # as when the other process ends
    CudaReceiver(NUM_SLOTS, SLOT_BYTES, port).close()


def test_what_is_no_window_is_refused(inbox: DescriptorInbox) -> None:
    offer = Receiver(NUM_SLOTS, SLOT_BYTES)
    with pytest.raises(TransportError, match="expected a socket with a handle"):
        CudaSender(os.memfd_create("no socket"), offer, FakePort())
    with pytest.raises(TransportError, match="no memory of the GPU can be shared: no memory"):
        CudaReceiver(NUM_SLOTS, SLOT_BYTES, FakePort("make"))
    receiver = CudaReceiver(NUM_SLOTS, SLOT_BYTES, FakePort())
    receiver.hand_over(inbox.name)
    with pytest.raises(TransportError, match="cannot be opened: b'handle', which is not ours"):
        CudaSender(inbox.take(receiver.offer.token), receiver.offer, FakePort("open"))
    receiver.close()
    receiver = CudaReceiver(NUM_SLOTS, SLOT_BYTES, FakePort())
    receiver.hand_over(inbox.name)
    with pytest.raises(TransportError, match="expected slots of a multiple of 16 bytes, got 60"):
        CudaSender(inbox.take(receiver.offer.token), replace(receiver.offer, slot_bytes=60), FakePort())
    receiver.close()


def test_a_lost_device_keeps_no_window(inbox: DescriptorInbox) -> None:
    port = FakePort("finish")
    receiver = CudaReceiver(NUM_SLOTS, SLOT_BYTES, port)
    receiver.close()
    del receiver
    assert not is_there(port)


@pytest.mark.parametrize("refuses", ["make", "open"])
def test_without_a_window_of_the_gpu_pages_go_through_the_hosts_memory(refuses: str) -> None:
    with connectors("tcp,ipc") as (decode, ours, prefill, theirs):
        ours.port, theirs.port = FakePort(refuses), FakePort(refuses)
        engine = PrefillEngine(prefill, theirs, 8)
        transfer_id = decode.fetch(request(5, 2), source_of(prefill.address), 0, [1, 2], 60)
        assert engine.serve(decode, 1) == [Fetched(transfer_id, (6, 7))]
        assert decode.stats().received["ipc"].num_transfers == 1
        engine.finish()
