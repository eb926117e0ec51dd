"""The memory that KV travels from and to, as the connector sees it: bytes of a block in a layer, whatever they mean.

The memory may be a device's, on which steps are under way. What the thread that starts them says keeps the two apart:
pages are read and written after the steps that were started at the last `follow_steps`, and steps that are started
after `end_writes` find what was written before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DevicePage:
    """A page in memory of the device: its address and length."""

    address: int
    nbytes: int


class Window(Protocol):
    """Memory of a device, until nothing refers to this."""

    @property
    def address(self) -> int:
        """Where it begins."""


class DevicePort(Protocol):
    """Pages in a device's memory that go to, and come from, memory that devices of other processes reach.

    For one thread; as Pages after the last `follow_steps`. Places in a window are multiples of `unit_bytes`.
    """

    unit_bytes: int

    def make_window(self, num_bytes: int) -> tuple[Window, bytes]:
        """Return memory of the device, and what `open_window` elsewhere takes for it; ValueError: there is none."""

    def open_window(self, handle: bytes, num_bytes: int) -> Window:
        """Return another process's memory, of at least so many bytes; ValueError: there is none."""

    def send(self, layer: int, block_ids: Sequence[int], places: Sequence[int]) -> None:
        """Copy pages to addresses, one for each; returns when they are there."""

    def write_from(self, layer: int, block_id: int, place: int) -> None:
        """Start to overwrite a page with what is at an address until `finish`."""

    def finish(self) -> None:
        """Return when all that was started is done."""


class Pages(Protocol):
    """The KV pages of an instance. Layers are numbered: the target's, then the draft layers.

    Attributes:
        groups: KV group of each layer.
    """

    num_layers: int
    groups: Sequence[int]

    @property
    def port(self) -> DevicePort | None:
        """How pages go from one device's memory to another's; None = they are in the host's, or do not."""

    def page_bytes(self, layer: int) -> int:
        """Bytes of one block in this layer."""

    def read_all(self, layer: int, block_ids: Sequence[int]) -> Sequence[tuple[Bytes, ...]]:
        """The pieces of each of some pages, u8[n] and contiguous, together page_bytes(layer); until the next call."""

    def awaited(self, layer: int) -> Callable[[], None] | None:
        """What a write to this layer would wait for, for the writer to call on a thread of its own; None = nothing.

        Raises what the device's failing does.
        """

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        """Overwrite a page with page_bytes(layer) bytes, the pieces one after the other."""

    def follow_steps(self) -> None:
        """Read and write after the steps that were started. For the thread that starts steps."""

    def end_writes(self) -> None:
        """Have steps that are started from here on find what was written. For the thread that starts steps."""
