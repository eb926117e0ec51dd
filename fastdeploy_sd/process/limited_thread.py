"""Runs a function in a thread of the event loop, and stops it when it computes for too long."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TimeLimitError(BaseException):
    """Raised inside a function that is stopped. No `Exception`, which the function itself might catch."""


async def run_within(cpu_s: float, function: Callable[[], T]) -> T:
    """Return the result of `function`, which runs in a thread and is stopped after `cpu_s` of processor time.

    Cancelling stops it too. A call of native code is not interrupted: the stop takes effect when it returns, as a
    TimeLimitError.
    """
    run = _Run(function)
    future = asyncio.get_running_loop().run_in_executor(None, run)
    try:
        while not (await asyncio.wait((future,), timeout=cpu_s))[0]:
            if run.used_cpu_s() >= cpu_s:
                run.stop()
    except asyncio.CancelledError:
        run.stop()
        future.cancel()
        raise
    return future.result()


class _Run(Generic[T]):
    """One call of a function. The lock makes sure that the exception meets no other call of the same thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_stopped = False
        self._started_s = 0.0

    def __call__(self) -> T:
        thread = threading.get_ident()
        with self._lock:
            if self._is_stopped:
                raise TimeLimitError
            self._started_s, self._thread = time.thread_time(), thread
        try:
            try:
                return self._function()
            finally:
                self._end(thread)
        finally:
            self._end(thread)  # if the exception interrupted the first one

    def _end(self, thread: int) -> None:
        with self._lock:
            self._thread = None
            _raise_in(thread, None)  # if it has not been raised yet

    def used_cpu_s(self) -> float:
        """Return how long the function has computed; 0 when it does not run."""
        with self._lock:
            if self._thread is None:
                return 0.0
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread)) - self._started_s

    def stop(self) -> None:
        """Raise TimeLimitError in the function; callbacks of the interpreter swallow it: then call this again."""
        with self._lock:
            if self._thread is not None:
                _raise_in(self._thread, TimeLimitError)
            self._is_stopped = True


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have a thread raise an error before its next bytecode; None takes an error back that it has not raised."""
    value = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)
