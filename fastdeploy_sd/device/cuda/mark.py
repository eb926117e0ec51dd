"""Marks on the stream of a GPU; see Mark."""

from __future__ import annotations

import ctypes

from fastdeploy_sd.device.cuda.handles import new_event
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.mark import Mark


class CudaMark:
    """See Mark: an event of CUDA's.

    Args:
        stream: of the device.
    """

    def __init__(self, library: CudaLibrary, stream: int) -> None:
        self._library, self._stream = library, stream
        self._event = new_event(library)

    @property
    def event(self) -> int:
        """Address of the event."""
        return self._event.address

    def record(self) -> None:
        """See Mark."""
        self._library.call("event_record", self.event, self._stream)

    def wait(self) -> None:
        """See Mark."""
        self._library.call("event_synchronize", self.event)

    def seconds_since(self, other: Mark) -> float:
        """See Mark."""
        assert isinstance(other, CudaMark)
        milliseconds = ctypes.c_float()
        self._library.call("event_elapsed", other.event, self.event, ctypes.byref(milliseconds))
        return milliseconds.value / 1e3
