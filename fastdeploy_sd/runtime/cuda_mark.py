"""Marks on the stream of a GPU; see Mark."""

from __future__ import annotations

import ctypes
import weakref

from fastdeploy_sd.runtime.cuda_library import CudaLibrary
from fastdeploy_sd.runtime.mark import Mark


class CudaMark:
    """See Mark: an event of CUDA's.

    Args:
        stream: of the device.
    """

    def __init__(self, library: CudaLibrary, stream: int) -> None:
        self._library, self._stream = library, stream
        self.event = library.made("event_create")
        weakref.finalize(self, library.functions.fdsd_cuda_event_destroy, ctypes.c_void_p(self.event))

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
