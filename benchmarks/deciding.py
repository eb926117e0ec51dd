"""What a method that chooses drafts takes to do so: phase by phase, in the steps of an engine. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.percentiles import percentiles
from fastdeploy_sd.spec_decode.control.policy import PHASES
from fastdeploy_sd.spec_decode.control.step_stats import StepStats
from fastdeploy_sd.spec_decode.router import create_proposer
from fastdeploy_sd.types.draft_methods import METHODS

if TYPE_CHECKING:
    from fastdeploy_sd.config import Config, SpeculativeConfig
    from fastdeploy_sd.spec_decode.proposer import Proposer, ProposerContext

_ASK, _DECIDING, _AROUND = "ask", "deciding", "around"
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class DecidingCost:
    """What drafting took under a method that chooses.

    Attributes:
        asked: share of the steps in which it was asked; it rests in the others. Where nobody had a draft lately it only
            looks for one in most of these: the phases behind asking are 0 then.
        us: {least, p50, p90, p99} over the steps in which it was asked, by phase: PHASES; `deciding`, all of them but
            asking the drafters; and `around`, the rest of the runner's phase `draft`.
        us_per_step: of drafting, over all steps, the mean.
    """

    asked: float
    us: dict[str, dict[str, float]]
    us_per_step: float


DECIDING_COLUMNS = {
    "Method": "{0.load.method}",
    "Requests": "{0.load.num_requests}",
    "Asked": "{0.deciding.asked:.0%}",
    **{name.capitalize(): f"{{0.deciding.us[{name}][p50]:.1f}}" for name in (*PHASES, _AROUND, _DECIDING)},
    "Least": f"{{0.deciding.us[{_DECIDING}][least]:.1f}}",
    "All per step us": "{0.deciding.us_per_step:.1f}",
}


class DecisionClock:
    """Has a proposer that chooses tell its times, and keeps them."""

    def __init__(self) -> None:
        self._step_stats: StepStats | None = None
        self._now = np.zeros(len(PHASES), np.float64)
        self._seconds: list[list[float]] = []
        self._num_steps, self._total_s = 0, 0.0

    def make_proposer(self, config: SpeculativeConfig, context: ProposerContext) -> Proposer:
        """As create_proposer."""
        if METHODS[config.method].chooses:
            self._step_stats = context.step_stats
            self._step_stats.phase_seconds = self._now
        return create_proposer(config, context)

    def take_profile(self, config: Config, executor: Any) -> None:
        """Measure what steps cost, for a method that chooses, as a server does."""
        from fastdeploy_sd.worker.autotune.cost_file import kept_profile

        if self._step_stats is not None:
            self._step_stats.profile = kept_profile(config, executor.model_info, executor.execute)

    def restart(self) -> None:
        """Forget the steps until now."""
        self._seconds.clear()
        self._now[:] = 0.0
        self._num_steps, self._total_s = 0, 0.0

    def note(self, draft_s: float) -> None:
        """A step is over, of which drafting took so long."""
        self._num_steps += 1
        self._total_s += draft_s
        if self._now.any():
            seconds = self._now.tolist()
            whole = sum(seconds)
            self._seconds.append([*seconds, whole - seconds[PHASES.index(_ASK)], draft_s - whole])
            self._now[:] = 0.0

    def cost(self) -> DecidingCost | None:
        """Return what was noted; None where nobody was asked."""
        if not self._seconds:
            return None
        us = np.array(self._seconds) * _US_PER_S
        names = (*PHASES, _DECIDING, _AROUND)
        of_phase = {name: us[:, i].tolist() for i, name in enumerate(names)}
        return DecidingCost(
            len(us) / self._num_steps,
            {name: {"least": min(values), **(percentiles(values) or {})} for name, values in of_phase.items()},
            self._total_s / self._num_steps * _US_PER_S,
        )
