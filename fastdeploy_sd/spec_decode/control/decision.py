"""What a draft policy says: of the next step, and of how well it judged. Decides nothing."""

from __future__ import annotations

from typing import NamedTuple

from fastdeploy_sd.types import DraftTokens


class SourceStats(NamedTuple):
    """How well the drafts of a source were judged.

    Attributes:
        num_scored: drafts compared with the text, each after those before it in its offer were right.
        expected, observed: how many of them should have been right, and were.
        squared_error: sum of the squared differences between probability and outcome.
        num_wanted: drafts that went into a step.
        wanted_expected, wanted_accepted: how many of them should have been accepted, and were.
    """

    num_scored: int
    expected: float
    observed: int
    squared_error: float
    num_wanted: int
    wanted_expected: float
    wanted_accepted: int


class Decision(NamedTuple):
    """What goes into the next step.

    Attributes:
        drafts: of every row, with their sources; the prefix of a row, or as much of it as is worth it, included.
        num_tokens, time: expected of the step, the time in the unit of its DraftTimes.
        num_offered: drafts that were looked at.
        first_draft_cost: what a draft takes beside everything else, over what the step takes without any; infinity
            where the step has no room for one.
        plain_time: of the step without drafts.
    """

    drafts: DraftTokens
    num_tokens: float
    time: float
    num_offered: int
    first_draft_cost: float
    plain_time: float
