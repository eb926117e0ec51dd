"""Values of the controller: step times in; the decision, the forecast and statistics of its judgement out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.types import DraftTokens

F64 = npt.NDArray[np.float64]
# Drafts in a step at most; more are not worth it on any machine.
MAX_STEP_DRAFTS = 512


class SourceStats(NamedTuple):
    """How well the drafts of a source were judged.

    Attributes:
        num_scored: drafts compared with the text, after right ones only; `observed` of `expected` were right.
        squared_error: sum of the squared differences between probability and outcome.
        num_wanted: drafts in steps; `wanted_accepted` of `wanted_expected` were accepted.
    """

    num_scored: int
    expected: float
    observed: int
    squared_error: float
    num_wanted: int
    wanted_expected: float
    wanted_accepted: int


class Decision(NamedTuple):
    """The drafts of the next step, and what is expected of them.

    Attributes:
        drafts: with their sources; they include the worthwhile part of the row's prefix.
        num_tokens, time: expected of the step, in the unit of its DraftTimes.
        first_draft_cost: the time that one draft adds, over `plain_time`; infinity where there is no room for one.
        plain_time: of the step without drafts.
    """

    drafts: DraftTokens
    num_tokens: float
    time: float
    num_offered: int
    first_draft_cost: float
    plain_time: float


class DraftTimes(NamedTuple):
    """The time of a step with 0, 1, .. drafts, in any unit:

        curve[num_rows + d] + fixed + d * per_draft, and any_draft more where d > 0

    Attributes:
        curve: f64[N], by rows of a step; rising from num_rows on. Its owner may change it after a step.
        num_rows: of the step without drafts, < N.
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
    """What is known of the next step, and of all finished ones.

    Attributes:
        least_gain, is_off, is_worth_asking, gain: see RegressionDetector in custom_ops/cpu/drafters.
        speed: time of steps over their time in the profile: 1.7 = they take 1.7 times as long.
        is_decode_only: the finished step had only rows that drafts are chosen for, and rows that forbid drafts.
        is_decided: drafts of the next step are chosen.
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
