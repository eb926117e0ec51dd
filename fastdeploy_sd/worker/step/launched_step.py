"""A step between its launch and its tokens. Knows no table and no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastdeploy_sd.device.device_buffers import Output
from fastdeploy_sd.spec_decode.control.report import StepStats
from fastdeploy_sd.types import SchedulerOutput
from fastdeploy_sd.worker.step.batch import PendingRows


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """An in-flight step and its times (seconds of time.perf_counter).

    Attributes:
        output: its tokens, not yet arrived.
        rows: None = no step is launched before its `finish`, so the step's memory is its own.
        num_tokens, num_requests, num_logits: of the step; its memory may have those of the next one.
        begin, built, computed, launched: preparation begun and done, model started, verification started.
        wait_begin: when the host began to wait for its tokens.
    """

    plan: SchedulerOutput
    output: Output
    rows: PendingRows | None
    num_tokens: int
    num_requests: int
    num_logits: int
    begin: float
    built: float
    computed: float
    launched: float
    wait_begin: float = 0.0

    def report(self, stats: StepStats, verified: float, ended: float) -> None:
        """Add this step to the statistics.

        Args:
            verified: when its tokens were known. ended: when the step before it was finished.
        """
        begin = max(self.begin, ended)  # an earlier launch waited for the step before
        stats.num_prompt_tokens_ahead = self.plan.num_prompt_tokens_ahead
        stats.num_tokens, stats.num_requests = self.num_tokens, self.num_requests
        stats.seconds, stats.host_seconds = verified - begin, begin - ended
        # Every row of logits is a request's newest token or a draft; other rows are parts of prompts.
        stats.num_prompt_tokens = self.num_tokens - self.num_logits

    def timings_ms(self, verified: float, drafted: float) -> Mapping[str, float]:
        """Return the host's time by phase, and the device's idle time before the step.

        Time in which the device waited for new requests does not count.
        """
        timings = {
            "batch": (self.built - self.begin) * 1e3,
            "forward": (self.computed - self.built) * 1e3,
            "verify": (self.launched - self.computed + verified - self.wait_begin) * 1e3,
            "draft": (drafted - verified) * 1e3,
        }
        if self.output.idle_s and len(self.plan.new) < len(self.plan.request_ids):
            timings["idle"] = self.output.idle_s * 1e3
        return timings
