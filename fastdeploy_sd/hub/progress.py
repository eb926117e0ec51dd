"""Shows the progress of fetching a model: a bar on a terminal, elsewhere a log line every few seconds.

It measures the folder, so it works for every hub and every kind of transfer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tqdm import tqdm

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_LOG_INTERVAL_S = 5.0
_GB = 1e9
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own are


class FetchProgress:
    """Counts the bytes that a folder gains.

    Args:
        name: of the model.
        folder: where files are written; it may not exist yet.
        total: bytes to come.
    """

    def __init__(self, name: str, folder: Path, total: int) -> None:
        self._name, self._folder, self._total = name, folder, total
        self._before = _num_bytes(folder)
        # None: no bar unless standard error is a terminal.
        self._bar = tqdm(total=total, desc=f"fetching {name}", unit="B", unit_scale=True, disable=None, leave=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._bar.close()

    def _watch(self) -> None:
        next_line = time.monotonic() + _LOG_INTERVAL_S
        while not self._ended.wait(_POLL_S):
            num_done = min(_num_bytes(self._folder) - self._before, self._total)
            self._bar.update(num_done - self._bar.n)
            if self._bar.disable and time.monotonic() >= next_line:
                _log.info("fetching %s: %.1f of %.1f GB", self._name, num_done / _GB, self._total / _GB)
                next_line = time.monotonic() + _LOG_INTERVAL_S


def _num_bytes(folder: Path) -> int:
    """Return the bytes that were written of the files below a folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(root, name))
            except OSError:
                continue  # moved meanwhile
            total += min(found.st_size, found.st_blocks * _BLOCK_BYTES)
    return total
