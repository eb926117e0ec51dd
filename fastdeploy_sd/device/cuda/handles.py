"""Streams and events of a GPU. They are destroyed when nothing refers to them."""

from __future__ import annotations

import ctypes
import functools
import weakref

from fastdeploy_sd.device.buffer import Event
from fastdeploy_sd.device.cuda.library import CudaLibrary


class CudaHandle:
    """An object of the driver and its address, until nothing refers to this; raises ValueError where none is made.

    A stream completes its work before it is destroyed. A thread that uses the address keeps this object.
    """

    __slots__ = ("__weakref__", "address")

    def __init__(self, library: CudaLibrary, maker: str, destroyer: str) -> None:
        self.address = library.made(maker)
        destroy = functools.partial(library.discard, destroyer)
        weakref.finalize(self, destroy, self.address).atexit = False  # the system frees what a process leaves


def new_stream(library: CudaLibrary) -> CudaHandle:
    """Return a stream that waits for no other stream; raises as CudaHandle."""
    return CudaHandle(library, "stream_create", "stream_destroy")


def new_event(library: CudaLibrary, *, sleeps: bool = False) -> CudaHandle:
    """Return an event; raises as CudaHandle. A wait for one that sleeps does not spin, and it has no time."""
    return CudaHandle(library, "sleeping_event_create" if sleeps else "event_create", "event_destroy")


class CudaEvent(Event):
    """An event of a GPU's stream."""

    def __init__(self, library: CudaLibrary, stream: int) -> None:
        self._library, self._stream = library, stream
        self._event = new_event(library)

    def record(self) -> None:
        self._library.call("event_record", self._event.address, self._stream)

    def wait(self) -> None:
        self._library.call("event_synchronize", self._event.address)

    def seconds_since(self, other: Event) -> float:
        assert isinstance(other, CudaEvent)
        milliseconds = ctypes.c_float()
        begin, end = other._event.address, self._event.address
        self._library.call("event_elapsed", begin, end, ctypes.byref(milliseconds))
        return milliseconds.value / 1e3
