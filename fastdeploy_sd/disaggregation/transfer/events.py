"""What a connector tells the engine, in a queue that wakes a sleeping reader. Knows no socket."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass

from fastdeploy_sd.disaggregation.transfer.counters import Failure
from fastdeploy_sd.errors import DeviceLost
from fastdeploy_sd.types import Request

TransferId = str


@dataclass(frozen=True, slots=True)
class Fetched:
    """To a decode instance: all pages are written. drafts: the first output token and the drafts after it, or ()."""

    transfer_id: TransferId
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """To a decode instance: the pages' contents are undefined, and nothing writes them any more."""

    transfer_id: TransferId
    reason: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class PrefillWanted:
    """To a prefill instance: compute this prompt and send pages [first_block, first_block + num_blocks) of it."""

    transfer_id: TransferId
    request: Request
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefillCancelled:
    """To a prefill instance: this one is not waited for any more. `Sent` follows."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Sent:
    """To a prefill instance, once for every PrefillWanted: the transfer has ended and its pages are read no more."""

    transfer_id: TransferId


Event = Fetched | FetchFailed | PrefillWanted | PrefillCancelled | Sent


class EventQueue:
    """Events from one thread to another; `fd` is readable while events wait."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._lost: DeviceLost | None = None

    def put(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            os.eventfd_write(self.fd, 1)

    def fail(self, lost: DeviceLost) -> None:
        """Have `take` raise this from now on."""
        with self._lock:
            self._lost = lost
            os.eventfd_write(self.fd, 1)

    def take(self) -> list[Event]:
        """Return all events, oldest first; raises DeviceLost after `fail`."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
            events, self._events = self._events, []
            return events

    def drop(self, transfer_id: TransferId) -> None:
        with self._lock:
            self._events = [event for event in self._events if event.transfer_id != transfer_id]

    def close(self) -> None:
        os.close(self.fd)
