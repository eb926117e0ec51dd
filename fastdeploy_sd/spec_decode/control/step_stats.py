"""What a worker and a drafting method that chooses tell each other beside the drafts. Knows neither."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.spec_decode.control.profile import CostProfile
from fastdeploy_sd.types import ChoiceReport


@dataclass(slots=True)
class StepStats:
    """One per worker; written in every step. Methods that do not choose neither read nor write it.

    Attributes:
        num_tokens, num_requests: that the model ran in the step just verified, drafts and parts of prompts included.
        num_prompt_tokens: of them in parts of prompts.
        num_forbidden: of the requests those that allow no drafts: nobody drafts for them, a step brings each one token.
        num_prompt_tokens_ahead: in parts of prompts of the next step, as far as the scheduler knows.
        seconds: what the step took, drafting left out.
        host_seconds: between the end of the step before, its drafting included, and the beginning of this one.
        profile: measured times of steps; None = not measured.
        skip_draft_steps: so many steps from now on need not be drafted in; the worker counts down, and up in
            num_skipped_steps, as a method does that finds nothing to choose from. A new request ends that.
        phase_seconds: f64[5], which a method that chooses adds the seconds of its phases to, if this is there when the
            method is made; see AutoPolicy.measure. None = nobody measures.
        report: what the method made of the steps so far; None = no method chooses.
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
    phase_seconds: npt.NDArray[np.float64] | None = None
    report: ChoiceReport | None = None
