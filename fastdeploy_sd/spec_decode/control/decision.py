"""What the controller is told of times, and what it tells: of the next step, and of how well it judged."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.types import DraftTokens

F64 = npt.NDArray[np.float64]
# Drafts in a step at most; a step with more is not worth it on any machine.
MAX_STEP_DRAFTS = 512


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
        first_draft_cost: what a draft adds to the step, over what the step takes without any; infinity
            where the step has no room for one.
        plain_time: of the step without drafts.
    """

    drafts: DraftTokens
    num_tokens: float
    time: float
    num_offered: int
    first_draft_cost: float
    plain_time: float


class DraftTimes(NamedTuple):
    """What a step takes with 0, 1, .. drafts in it, in any unit:

        curve[num_rows + d] + fixed + d * per_draft, and any_draft more where d > 0

    Attributes:
        curve: f64[N], by rows of a step, at most N - 1; rising from num_rows on. Not to be written to; its owner
            may do so after a step.
        num_rows: of the step without drafts, < N.
        fixed: what every step takes besides; > -curve[num_rows].
        per_draft: what each draft does, >= 0.
        any_draft: what a step does that has any, >= 0.
    """

    curve: F64
    num_rows: int
    fixed: float
    per_draft: float = 0.0
    any_draft: float = 0.0

    def array(self, max_drafts: int) -> F64:
        """Return f64[n], 1 <= n <= max_drafts + 1, > 0."""
        found = self.curve[self.num_rows : self.num_rows + min(max_drafts, MAX_STEP_DRAFTS) + 1] + self.fixed
        drafts = np.arange(len(found))
        times: F64 = found + self.per_draft * drafts + self.any_draft * (drafts > 0)
        return times


class StepForecast(NamedTuple):
    """What is known of the step ahead, and of all that are over.

    Attributes:
        least_gain: that drafts must be expected to bring in it, see RegressionDetector.least_gain.
        is_off, is_worth_asking, gain: see RegressionDetector.
        speed: how long steps take against when they were measured: 1.7 = they take 1.7 times as long.
        predicted_s, measured_s: of all steps that were predicted.
        is_alone: nothing was in the step that is over but rows that drafts are chosen for, and those of requests that
            forbid drafts.
        is_decided: the policy has chosen drafts for the step ahead.
    """

    least_gain: float
    is_off: float
    is_worth_asking: float
    gain: float
    speed: float
    predicted_s: float
    measured_s: float
    is_decode_only: float
    is_decided: float
