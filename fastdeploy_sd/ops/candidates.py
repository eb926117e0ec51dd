"""What verify_draft_tokens is told beside the tokens; shared by its implementations. NumPy only."""

from __future__ import annotations

import enum
from typing import NamedTuple

from fastdeploy_sd.types import I32


class AcceptPolicy(enum.IntEnum):
    """Whether drafts are judged at all; the numbers are the kernels'."""

    NORMAL = 0
    ACCEPT_ALL = 1
    REJECT_ALL = 2


class Candidates(NamedTuple):
    """The tokens that are plausible at each logits row, and how they judge drafts.

    Attributes:
        token_ids: i32[L, C], best first, -1 past the last one.
        lens: i32[L], the first lens[l] of row l are usable: a draft that is one of them is kept.
        verify_window: how many drafts, each the best of its row, must follow a second-best draft that is not usable for
            all of them to be kept.
    """

    token_ids: I32
    lens: I32
    verify_window: int
