"""Ctrl-C between two engine steps instead of inside one, where it would leave the engine half updated."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self


class DeferredInterrupt:
    """Within the `with` block SIGINT is only noted; `raise_pending` turns it into KeyboardInterrupt.

    A second SIGINT raises at once, for a step that hangs; the engine is to be given up then. Outside the main thread,
    where Python delivers no signals, and where the program has its own SIGINT handler, it does nothing.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._is_installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt if SIGINT came since the last call."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True
