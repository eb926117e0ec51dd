"""Host arrays whose content a device reads or writes. On the host itself both sides are one."""

from __future__ import annotations

from typing import Any, Protocol

from fastdeploy_sd.device.arrays import Array


class Mirror(Protocol):
    """A host array and its twin on the device.

    The host's is the truth where the host writes, and the device's where a kernel does. Nothing happens by itself:
    who changes rows says so.

    Attributes:
        array: the host's.
        tensor: the device's, for programs and bound calls.
    """

    array: Array
    tensor: Any

    def of(self, view: Array) -> Any:
        """Return the twin of a contiguous view into the array.

        Raises:
            ValueError: it is not one.
        """
        ...

    def upload(self, begin: int = 0, end: int | None = None) -> None:
        """Say that the host changed rows [begin, end): what is started from here on reads what they then hold."""
        ...

    def download(self, begin: int = 0, end: int | None = None) -> None:
        """Start copying rows [begin, end) to the host, behind what was started; they are there after `Device.wait`."""
        ...

    def fetcher(self) -> Fetcher:
        """Return what copies the whole array to the host, in memory of its own: several may be under way."""
        ...


class Fetcher(Protocol):
    """A copy of a whole mirror to the host, made again and again; the next one after `take` only."""

    def start(self) -> None:
        """Start it, behind what was started."""
        ...

    def take(self) -> None:
        """Wait for it, and not for what was started since, and have it in the host's array.

        Raises:
            ValueError: a kernel before it failed.
        """
        ...


class HostMirror:
    """The mirror of a device that is the host."""

    def __init__(self, array: Array) -> None:
        self.array = self.tensor = array

    def of(self, view: Array) -> Array:
        """See Mirror."""
        offset_in(self.array, view)
        return view

    def upload(self, begin: int = 0, end: int | None = None) -> None:
        """See Mirror."""

    def download(self, begin: int = 0, end: int | None = None) -> None:
        """See Mirror."""

    def fetcher(self) -> HostFetcher:
        """See Mirror."""
        return HostFetcher()


class HostFetcher:
    """Of a device that is the host: nothing is copied."""

    def start(self) -> None:
        """See Fetcher."""

    def take(self) -> None:
        """See Fetcher."""


def offset_in(array: Array, view: Array) -> int:
    """Return how many bytes behind its beginning an array has a view.

    Raises:
        ValueError: the view is not within the array, or not contiguous.
    """
    offset = view.ctypes.data - array.ctypes.data
    if not view.flags.c_contiguous or offset < 0 or offset + view.nbytes > array.nbytes:
        raise ValueError(
            f"view: expected contiguous elements of {array.dtype}{list(array.shape)}, got {view.dtype}"
            f"{list(view.shape)} {offset} bytes behind its beginning"
        )
    return offset
