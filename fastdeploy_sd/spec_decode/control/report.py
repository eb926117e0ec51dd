"""The statistics that a worker and the controller share, and the report of the choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastdeploy_sd.spec_decode.control.decision import SourceStats, StepForecast
from fastdeploy_sd.spec_decode.control.profile import CostProfile
from fastdeploy_sd.types import Calibration, ChoiceReport
from fastdeploy_sd.types.draft_methods import DraftSource

# Steps between two reports, and how many of them must have been asked in: a report takes as long as asking.
_STEPS_PER_REPORT, _ASKED_PER_REPORT = 32, 2


@dataclass(slots=True)
class StepStats:
    """One per worker; written in every step, and used by methods that choose.

    Attributes:
        num_tokens, num_requests: of the step just verified, drafts and `num_prompt_tokens` of prompts included.
        num_forbidden: requests that allow no drafts: a step brings each of them one token.
        num_prompt_tokens_ahead: in parts of prompts of the next step, as far as the scheduler knows.
        seconds: of the step, without drafting.
        host_seconds: from the end of the step before, with its drafting, to the begin of this one.
        skip_draft_steps: so many next steps need no drafting. The worker counts them down, and counts them up in
            num_skipped_steps, as does a method that finds nothing to choose from. A new request ends that.
    """

    num_tokens: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_forbidden: int = 0
    num_prompt_tokens_ahead: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    profile: CostProfile | None = None
    skip_draft_steps: int = 0
    num_skipped_steps: int = 0
    report: ChoiceReport | None = None


class ChoiceLog:
    """Counts steps by what was chosen.

    Args:
        drafts: the choice with drafts; the others are reasons to have none.
        first: the choice before the first step.
    """

    def __init__(self, choices: Iterable[str], drafts: str, first: str) -> None:
        self._num_steps, self._drafts, self._latest = dict.fromkeys(choices, 0), drafts, first
        self._num_unreported = self._num_asked = 0

    def note(self, choice: str) -> None:
        self._num_steps[choice] += 1
        self._num_unreported += 1
        self._num_asked += 1
        self._latest = choice

    def note_skipped(self, num_steps: int) -> None:
        """Count skipped steps with the latest choice."""
        self._num_steps[self._latest] += num_steps
        self._num_unreported += num_steps

    @property
    def is_due(self) -> bool:
        return self._num_unreported >= _STEPS_PER_REPORT and self._num_asked >= _ASKED_PER_REPORT

    def report(self, known: StepForecast, stats: Mapping[DraftSource, SourceStats]) -> ChoiceReport:
        self._num_unreported = self._num_asked = 0
        reason = "" if self._latest == self._drafts else self._latest
        judged = {
            source.name.lower(): Calibration(s.num_scored, s.expected, s.observed, s.squared_error)
            for source, s in stats.items()
        }
        return ChoiceReport(known.gain, reason, dict(self._num_steps), known.predicted_s, known.measured_s, judged)
