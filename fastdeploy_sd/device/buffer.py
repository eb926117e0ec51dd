"""What a device shares with the host: buffers that have a copy on each side, and events on its stream.

These are the host's own: both copies are one array, and everything is done as soon as it is called. A device with
memory of its own overrides them.
"""

from __future__ import annotations

import time
from typing import Any

from fastdeploy_sd.device.arrays import Array


class HostDeviceBuffer:
    """An array of the host and its copy on the device, `tensor`. Nothing is copied until the caller says so."""

    def __init__(self, array: Array, tensor: Any = None) -> None:
        self.array = array
        self.tensor: Any = array if tensor is None else tensor

    def of(self, view: Array) -> Any:
        """Return the device's copy of a contiguous view of the array; raises ValueError for another view."""
        offset_in(self.array, view)
        return view

    def upload(self, begin: int = 0, end: int | None = None) -> None:
        """Mark rows [begin, end) as changed by the host: calls started from here on read what they then hold."""

    def download(self, begin: int = 0, end: int | None = None) -> None:
        """Start to copy rows [begin, end) to the host after the calls so far. `Device.wait` completes the copy."""

    def fetcher(self) -> Fetcher:
        """Return a repeated copy of the whole array to the host, with staging memory of its own."""
        return Fetcher()


class Fetcher:
    """A copy of a whole buffer to the host. `start` and `take` alternate."""

    def start(self) -> None:
        """Start the copy after the calls so far."""

    def take(self) -> None:
        """Wait for the copy, but for no later call, and put it in the host's array."""


class Event:
    """A point on the device's stream, recorded again and again."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def record(self) -> None:
        """Move the event after all calls started so far."""
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device reaches the event, if it was recorded; raises ValueError: a kernel before it failed."""

    def seconds_since(self, other: Event) -> float:
        """Return the time between another event of this device and this one. The device has reached both."""
        return self._time - other._time


def offset_in(array: Array, view: Array) -> int:
    """Return the offset of a view from the start of an array, in bytes.

    Raises ValueError: the view is not contiguous, or not within the array.
    """
    offset = view.ctypes.data - array.ctypes.data
    if not view.flags.c_contiguous or offset < 0 or offset + view.nbytes > array.nbytes:
        raise ValueError(
            f"view: expected contiguous elements of {array.dtype}{list(array.shape)}, got {view.dtype}"
            f"{list(view.shape)} at byte offset {offset}"
        )
    return offset
