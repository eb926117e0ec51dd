"""Places in what a device was given to do: the host waits for them, and asks for the time between two."""

from __future__ import annotations

import time
from typing import Protocol


class Mark(Protocol):
    """A place, recorded again and again."""

    def record(self) -> None:
        """Be behind all that was started until now, and no longer where it was."""
        ...

    def wait(self) -> None:
        """Return when the device has come here; at once where it was never recorded.

        Raises:
            ValueError: a kernel before it failed.
        """
        ...

    def seconds_since(self, other: Mark) -> float:
        """Return how long after another one of this device the device came here; it has come to both."""
        ...


class HostMark:
    """The mark of a device that is the host: all that was started is done."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def record(self) -> None:
        """See Mark."""
        self.time = time.perf_counter()

    def wait(self) -> None:
        """See Mark."""

    def seconds_since(self, other: Mark) -> float:
        """See Mark."""
        assert isinstance(other, HostMark)
        return self.time - other.time
