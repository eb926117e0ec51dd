"""How far `verify` has come: a bar on a terminal, else a line every few seconds. Standard output has the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Self

from tqdm import tqdm

from fastdeploy_sd.cli.verify import Cell, EngineVariant

_LINE_EVERY_S = 10.0
# A sequence in a cell takes this part of what it takes alone, on average over all ways: most of them run in batches.
_SHARE_OF_ALONE = 0.3
_S_PER_MIN = 60


def estimate_s(ways: Sequence[EngineVariant], num_methods: int, num_requests: int, reference_s: float) -> float:
    """Return about how long the matrix takes, from the time that the requests took alone."""
    num_sequences = sum(way.num_passes * (way.num_requests or num_requests) for way in ways)
    return num_methods * num_sequences / num_requests * reference_s * _SHARE_OF_ALONE


def duration(seconds: float) -> str:
    """Return a rounded duration for people: "40 s" or "7 min"."""
    return f"{seconds:.0f} s" if seconds < 2 * _S_PER_MIN else f"{seconds / _S_PER_MIN:.0f} min"


def say(text: str) -> None:
    """Write a line to standard error."""
    print(f"verify: {text}", file=sys.stderr, flush=True)


class CellProgress:
    """Counts cells of the matrix."""

    def __init__(self, num_cells: int) -> None:
        self._num_cells, self._num_done = num_cells, 0
        self._begin = time.monotonic()
        self._next_line = self._begin + _LINE_EVERY_S
        # disable=None: no bar unless standard error is a terminal.
        self._bar = tqdm(total=num_cells, desc="verifying", unit="cell", disable=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, cell: Cell) -> None:
        """Count a cell that is done; one that differs is told at once."""
        self._num_done += 1
        self._bar.update()
        if not cell.is_equal:
            tqdm.write(f"verify: DIFFERS: {cell.method}, {cell.way}: {cell.difference}", file=sys.stderr)
        now = time.monotonic()
        if self._bar.disable and now >= self._next_line:
            left_s = (now - self._begin) / self._num_done * (self._num_cells - self._num_done)
            say(f"{self._num_done} of {self._num_cells} cells, about {duration(left_s)} left")
            self._next_line = now + _LINE_EVERY_S
