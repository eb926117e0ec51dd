"""Replays as a text table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastdeploy_sd.cli.replay.counts import ReplayCounts

_COLUMNS = (
    "method",
    "k",
    "shared cache",
    "tokens/step",
    "speed-up",
    "drafted",
    "accepted",
    "wasted",
    "us/call",
    "us/request",
    "memory MiB",
    "acceptance by position",
)
_MAX_POSITIONS = 8
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One row: a method with a draft length.

    Attributes:
        has_shared_cache: whether it drafts from other responses too; None = the method never does.
        speed_up: tokens per time against plain decoding, drafting itself not counted; None = no cost was given.
    """

    method: str
    num_speculative_tokens: int
    counts: ReplayCounts
    has_shared_cache: bool | None = None
    speed_up: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the row under plain names."""
        head = {
            "method": self.method,
            "num_speculative_tokens": self.num_speculative_tokens,
            "shared_cache": self.has_shared_cache,
        }
        gain = {} if self.speed_up is None else {"speed_up": self.speed_up}
        return head | gain | self.counts.to_json()


def replay_table(results: Sequence[ReplayResult]) -> str:
    """Return the rows as aligned text; acceptance is accepted over reached drafts, the first positions only."""
    rows = [_COLUMNS, *map(_cells, results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join(_line(row, widths) for row in rows)


def _cells(result: ReplayResult) -> tuple[str, ...]:
    c = result.counts
    memory = "-" if c.peak_memory_bytes is None else f"{c.peak_memory_bytes / _MIB:.1f}"
    rates = [f"{rate:.0%}" for rate in c.acceptance_per_position[:_MAX_POSITIONS]]
    return (
        result.method,
        str(result.num_speculative_tokens),
        {None: "-", True: "yes", False: "no"}[result.has_shared_cache],
        f"{c.tokens_per_verify_step:.2f}",
        "-" if result.speed_up is None else f"{result.speed_up:.3f}",
        str(c.num_drafted),
        str(c.num_accepted),
        str(c.num_drafted - c.num_accepted),
        f"{c.us_per_call:.1f}",
        f"{c.us_per_request:.1f}",
        memory,
        " ".join(rates),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    first, *numbers, last = zip(cells, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in numbers), last[0]]).rstrip()
