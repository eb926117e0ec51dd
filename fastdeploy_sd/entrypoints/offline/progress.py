"""A progress bar where one can be seen: tqdm, if it is installed and stderr is a terminal."""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any, Self


class ProgressBar:
    """Counts finished sequences; silent without a bar.

    Args:
        bar: a tqdm bar, or None.
    """

    def __init__(self, bar: Any | None) -> None:
        self._bar = bar

    def advance(self, count: int) -> None:
        """Note that `count` more sequences have ended."""
        if self._bar is not None and count:
            self._bar.update(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def progress_bar(total: int, is_wanted: bool) -> ProgressBar:
    """Return a bar over `total` sequences, or a silent one when unwanted, unseen or tqdm is not installed."""
    if not is_wanted or not sys.stderr.isatty():
        return ProgressBar(None)
    try:
        tqdm = importlib.import_module("tqdm")
    except ImportError:
        return ProgressBar(None)
    return ProgressBar(tqdm.tqdm(total=total, desc="generating", unit="seq", file=sys.stderr))
