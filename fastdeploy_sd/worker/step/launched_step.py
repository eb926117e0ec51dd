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
    """What was started, and when (seconds of time.perf_counter).

    Attributes:
        output: its tokens, on their way.
        rows: of a step that was opened, None = it alone is in the step's memory.
        num_tokens, num_requests, num_logits: of the step; its memory may have those of the next one.
        begin, built, computed, launched: of its preparation; when it was prepared, the model and verification started.
        wait_begin: when the host came back for its tokens.
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
        """Tell the statistics of steps about this one.

        Args:
            verified: when its tokens were known. ended: when the step before it was over.
        """
        begin = max(self.begin, ended)  # one that was launched before the step before it was over ran after that one
        stats.num_prompt_tokens_ahead = self.plan.num_prompt_tokens_ahead
        stats.num_tokens, stats.num_requests = self.num_tokens, self.num_requests
        stats.seconds, stats.host_seconds = verified - begin, begin - ended
        # Every row of logits is a request's newest token or a draft; what has none is a part of a prompt.
        stats.num_prompt_tokens = self.num_tokens - self.num_logits

    def timings_ms(self, verified: float, drafted: float) -> Mapping[str, float]:
        """What the host spent on it, by phase, and how long the device had nothing to do before it.

        The device may have waited for requests that were not there before: that does not count.
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
