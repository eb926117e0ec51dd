"""LayerSender: sends the pages of a step layer by layer while the step runs. Knows no engine."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
_JOIN_S = 10.0


class Signals(Protocol):
    """How far the running step is; see step.layer_signals.LayerSignals."""

    fd: int

    def begin(self) -> None: ...

    @property
    def num_layers(self) -> int: ...


class LayerSender(Generic[T]):
    """A thread that follows the signals of steps for which it was given something to send.

    `send` is called with a layer and each part of a step once the layer has stored it, never by two threads at a time.
    """

    def __init__(self, signals: Signals, num_layers: int, send: Callable[[int, T], None]) -> None:
        self._signals, self._num_layers, self._send = signals, num_layers, send
        self._lock = threading.Lock()
        self._parts: Sequence[T] = ()
        self._num_sent = 0
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="fdsd-layers", daemon=True)
        self._thread.start()

    def begin(self, parts: Sequence[T]) -> None:
        """A step begins that stores these."""
        with self._lock:
            self._signals.begin()
            self._parts, self._num_sent = parts, 0
        os.eventfd_write(self._wake, 1)

    def end(self) -> int:
        """The step is over; returns how many layers' parts were sent. The others are the caller's to send."""
        with self._lock:
            self._parts = ()
            return self._num_sent

    def close(self) -> None:
        """End the thread; nothing is sent afterwards. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed, self._parts = True, ()
        os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_S)
        os.close(self._wake)

    def _run(self) -> None:
        asleep, awake = select.poll(), select.poll()  # signals of steps that send nothing wake no thread
        asleep.register(self._wake, select.POLLIN)
        for fd in (self._wake, self._signals.fd):
            awake.register(fd, select.POLLIN)
        has_parts = False
        while True:
            (awake if has_parts else asleep).poll()
            with self._lock:
                if self._is_closed:
                    return
                for fd in (self._wake, self._signals.fd):
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                self._send_stored()
                has_parts = bool(self._parts)

    def _send_stored(self) -> None:
        if not self._parts:
            return
        num_stored = min(self._signals.num_layers, self._num_layers)
        for layer in range(self._num_sent, num_stored):
            for part in self._parts:
                self._send(layer, part)
        self._num_sent = max(self._num_sent, num_stored)
