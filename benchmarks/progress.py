"""A progress bar on standard error, so that standard output holds results only."""

from __future__ import annotations

import sys
from typing import TextIO

_WIDTH = 30


class Progress:
    """Counts up to `total`. Redraws one line on a terminal; elsewhere, e.g. in a log, at most eleven lines are written.

    Args:
        total: units of work, >= 1.
        label: what is being done.
        stream: where to draw.
    """

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        self._total = total
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._num_done = 0
        self._show()

    def advance(self, stage: str = "") -> None:
        """Count one unit; `stage` says what comes next."""
        self._num_done += 1
        self._show(stage)

    def _show(self, stage: str = "") -> None:
        filled = _WIDTH * self._num_done // self._total
        bar = "#" * filled + "." * (_WIDTH - filled)
        line = f"{self._label} [{bar}] {self._num_done}/{self._total} {stage}".rstrip()
        if not self._stream.isatty():
            if 10 * self._num_done // self._total != 10 * (self._num_done - 1) // self._total:
                print(line, file=self._stream, flush=True)
            return
        end = "\n" if self._num_done == self._total else ""
        print(f"\r\x1b[2K{line}", end=end, file=self._stream, flush=True)
