"""The progress of loading a model: a bar on a terminal, elsewhere a log line every few seconds."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

_log = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0
# A shorter load shows no bar.
_BAR_AFTER_S = 1.0
_GB = 1e9


class LoadProgress:
    """Counts bytes of weights as they are packed. Small models are loaded before anything is shown.

    Args:
        total: bytes of the checkpoint's tensors. A few of them are not packed.
        has_bar: False = lines only, as for a rank whose bar would be drawn over another's.

    Attributes:
        num_packed_bytes: what the packed weights take.
    """

    def __init__(self, total: int, *, has_bar: bool = True) -> None:
        self._total, self._num_done = total, 0
        self._next_line = time.monotonic() + _LOG_EVERY_S
        # None: no bar unless standard error is a terminal.
        self._bar = tqdm(
            total=total,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            disable=None if has_bar else True,
            leave=False,
            delay=_BAR_AFTER_S,
        )
        self.num_packed_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, num_bytes: int, num_packed_bytes: int) -> None:
        """Count a matrix: its bytes in the checkpoint, and its packed bytes."""
        self._num_done += num_bytes
        self.num_packed_bytes += num_packed_bytes
        self._bar.update(num_bytes)
        if self._bar.disable and time.monotonic() >= self._next_line:
            _log.info("loading weights: %.1f of about %.1f GB", self._num_done / _GB, self._total / _GB)
            self._next_line = time.monotonic() + _LOG_EVERY_S
