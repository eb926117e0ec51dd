"""What steps that are over teach: what the next one takes with all around it, and whether drafts pay. Knows no drafts.

All of it is in the kernel library: it runs in every step, and Python that ran a step ago is not in the caches.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_sd.device.arrays import address
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call, library
from fastdeploy_sd.device.program.bound_call import BoundCall
from fastdeploy_sd.spec_decode.control.cost import CostModel
from fastdeploy_sd.spec_decode.control.policy import AutoPolicy
from fastdeploy_sd.spec_decode.control.regression_detector import RegressionDetector
from fastdeploy_sd.spec_decode.control.step_stats import StepStats
from fastdeploy_sd.types.draft_methods import DraftSource

_NUM_OUTCOMES = 9


@dataclass(slots=True)
class StepPrediction:
    """What is known of a step before it runs.

    Attributes:
        asking_s: what choosing its drafts took.
        lookup_s: what it took without draft layers, and without looks, when look-ups were asked last; 0 = never.
        choosing_s: the same without draft layers; 0 where none were chosen.
        time, plain_time: see Decision; 0 = nothing was expected of it.
        is_certain: whether all of its drafts are.
    """

    asking_s: float = 0.0
    lookup_s: float = 0.0
    choosing_s: float = 0.0
    time: float = 0.0
    plain_time: float = 0.0
    is_certain: bool = False

    def expect_nothing(self) -> None:
        """It is a plain step, as far as is known."""
        self.time, self.plain_time, self.is_certain = 0.0, 0.0, False


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


class OnlineEstimator:
    """Learns from steps, in their order, and tells a policy what the next one takes.

    Args:
        guard: told what they bring.
        policy: whose times are written, and which of its sources are not asked.
        covered: sources of it whose drafts others mostly have as well: they are not asked where asking takes
            more than 0.03 of a step.
    """

    def __init__(self, detector: RegressionDetector, policy: AutoPolicy, covered: Collection[DraftSource] = ()) -> None:
        handle = ctypes.c_void_p()
        params = struct_type("EstimatorCreateParams")(
            detector=detector.handle,
            covered_sources=sum(1 << policy.sources.index(source) for source in covered),
            estimator=ctypes.addressof(handle),
        )
        call("estimator_create", params)
        self._handle = handle
        weakref.finalize(self, library().fdsd_estimator_destroy, handle)
        self._kept: list[object] = [detector, policy]
        self._outcome = np.zeros(_NUM_OUTCOMES, np.float64)
        learned = struct_type("EstimatorObserveParams")(
            estimator=handle, next=ctypes.addressof(policy.params), outcome=address(self._outcome)
        )
        self._params: Any = learned
        self._learn = BoundCall("estimator_observe", learned)

    def take_costs(self, costs: CostModel) -> None:
        """From now on the model's part of a step is what was measured; before, a draft takes a tenth of a step."""
        call("estimator_take_costs", struct_type("EstimatorTakeCostsParams")(estimator=self._handle, cost=costs.handle))
        self._kept.append(costs)

    def observe_and_decide(
        self, stats: StepStats, notes: StepPrediction, *, goes_on: bool, decides: bool = False
    ) -> StepForecast:
        """A step is over; the policy learns what the next one takes.

        Args:
            goes_on: the step before it had the same rows: those that the policy is bound to.
            decides: where drafts are allowed, and the next step is not to be plain, the policy chooses them as well.

        The board's rested steps count once.

        Raises:
            ValueError: a number is out of range; or the policy refused the rows, of which has been learned then.
        """
        p = self._params
        p.num_requests, p.num_rows, p.num_prompt_tokens = (
            stats.num_requests,
            stats.num_tokens,
            stats.num_prompt_tokens,
        )
        p.num_forbidden, p.num_skipped_steps = stats.num_forbidden, stats.num_skipped_steps
        stats.num_skipped_steps = 0
        p.num_prompt_tokens_ahead, p.seconds, p.host_seconds = (
            stats.num_prompt_tokens_ahead, stats.seconds, stats.host_seconds,
        )  # fmt: skip
        p.goes_on, p.decides, p.is_certain = goes_on, decides, notes.is_certain
        p.asking_s, p.lookup_s, p.choosing_s = notes.asking_s, notes.lookup_s, notes.choosing_s
        p.time, p.plain_time = notes.time, notes.plain_time
        self._learn.run()
        return StepForecast._make(self._outcome.tolist())
