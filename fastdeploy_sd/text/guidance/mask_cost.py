"""Tracks the cost of one request's token masks, and limits its drafts by it. Knows no grammar, no step and no clock.

A request with expensive masks gets fewer drafts, as each has a mask of its own. If a single
mask is more than its share of a step, it is computed outside of the step. If that lasts too long, the request ends.
"""

from __future__ import annotations

# Processor time that grammars may add to a step: together, or where many requests have one, each.
STEP_S = 0.020
REQUEST_S = 0.001
# What a request may take beyond STEP_S for each of its tokens.
DEBT_S = 10.0
# An expensive mask is remembered for some twenty more: they often come again.
_FADE = 7 / 8
_MANY_ROWS = 1 << 20


def share_s(num_requests: int) -> float:
    """Return what each of so many requests with a grammar may take of a step, in seconds."""
    return max(STEP_S / max(num_requests, 1), REQUEST_S)


class MaskCost:
    """The cost of one request.

    Attributes:
        row_s: seconds that a row is expected to take: its mask, and the token in front of it.
        debt_s: seconds beyond STEP_S a token.
    """

    __slots__ = ("debt_s", "row_s")

    def __init__(self) -> None:
        self.row_s = self.debt_s = 0.0

    def note(self, num_rows: int, seconds: float, num_tokens: int = 1) -> None:
        """Count rows that took so long together, for so many tokens of output."""
        self.row_s = max(seconds / max(num_rows, 1), self.row_s * _FADE)
        self.debt_s = max(self.debt_s + seconds - STEP_S * num_tokens, 0.0)

    def max_rows(self, share: float) -> int:
        """Return how many rows the next step may have; 0 = they are computed off the step."""
        return int(share / self.row_s) if self.row_s * _MANY_ROWS > share else _MANY_ROWS

    @property
    def is_too_much(self) -> bool:
        """Whether the request must end."""
        return self.debt_s > DEBT_S
