"""Runs functions that wait or compute for long in threads, for a thread that must not wait for them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

NICE = 10

T = TypeVar("T")


class BackgroundCalls:
    """Functions that run in threads of their own, which do not keep the process from ending.

    Attributes:
        fd: readable while `take` has something to return.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock, self._ended, self._is_closed = threading.Lock(), deque[Future[Any]](), False

    def start(self, function: Callable[[], T], name: str) -> Future[T]:
        """Call a function in a new thread of this name; what it returns or raises is the future's."""
        future: Future[T] = Future()
        threading.Thread(target=self._run, args=(function, future), name=name, daemon=True).start()
        return future

    def take(self) -> list[Future[Any]]:
        """Return, once each, the calls that have ended."""
        if not self._ended:  # asked in every step
            return []
        with self._lock:
            ended, self._ended = list(self._ended), deque()
            os.eventfd_read(self.fd)
        return ended

    def close(self) -> None:
        """Forget what runs. May be called twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._ended.clear()
                os.close(self.fd)

    def _run(self, function: Callable[[], T], future: Future[T]) -> None:
        lower_priority()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        with self._lock:
            if not self._is_closed:
                self._ended.append(future)
                os.eventfd_write(self.fd, 1)


def lower_priority() -> None:
    """Have this thread run after those of the steps."""
    with contextlib.suppress(OSError):  # a matter of courtesy
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
