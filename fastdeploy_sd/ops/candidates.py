"""What the sampling ops are told about drafts; shared by their implementations. NumPy only."""

from __future__ import annotations

import enum
from typing import NamedTuple

from fastdeploy_sd.types import I32, DraftTokens

NOT_DRAWN = -2  # the token of a row that a wrong draft on its path has made useless


class AcceptPolicy(enum.IntEnum):
    """Whether drafts are verified at all; the numbers are the kernels'."""

    NORMAL = 0
    ACCEPT_ALL = 1
    REJECT_ALL = 2


class Candidates(NamedTuple):
    """The tokens that are plausible at each logits row, and how they verify drafts.

    Attributes:
        token_ids: i32[L, C], best first, -1 past the last one.
        lens: i32[L], the first lens[l] of row l are usable: a draft that is one of them is kept.
        verify_window: how many drafts, each the best of its row, must follow a second-best draft that is not usable for
            all of them to be kept.
    """

    token_ids: I32
    lens: I32
    verify_window: int


class DraftedRows(NamedTuple):
    """The drafts that a step's logits rows follow: row j > 0 of a request follows draft j - 1 and those on its path.

    `is_verified`: rows whose draft is wrong, and those after them, can be left out.
    """

    cu_num_logits: I32
    draft: DraftTokens
    is_verified: bool = True
