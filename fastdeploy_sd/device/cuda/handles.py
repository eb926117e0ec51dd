"""Streams and events of a GPU, which are destroyed when nothing refers to them. Knows no order between them."""

from __future__ import annotations

import functools
import weakref

from fastdeploy_sd.device.cuda.library import CudaLibrary


class CudaHandle:
    """What the driver made under an address, until nothing refers to this.

    What is under way on a stream is done first. Threads that may still use the address keep this object.

    Args:
        maker: the function of the library that makes it. destroyer: the one that destroys it.

    Raises:
        ValueError: the driver made none.
    """

    __slots__ = ("__weakref__", "address")

    def __init__(self, library: CudaLibrary, maker: str, destroyer: str) -> None:
        self.address = library.made(maker)
        destroy = functools.partial(library.discard, destroyer)
        weakref.finalize(self, destroy, self.address).atexit = False  # what a process has, its end gives back


def new_stream(library: CudaLibrary) -> CudaHandle:
    """Return a stream that waits for no other; raises as CudaHandle."""
    return CudaHandle(library, "stream_create", "stream_destroy")


def new_event(library: CudaLibrary, *, sleeps: bool = False) -> CudaHandle:
    """Return an event that nothing is recorded in; raises as CudaHandle.

    Args:
        sleeps: who waits for it takes no processor's time, and cannot ask when it happened.
    """
    return CudaHandle(library, "sleeping_event_create" if sleeps else "event_create", "event_destroy")
