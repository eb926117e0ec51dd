"""How many prompt tokens fit into a step with requests that decode. Knows no request and no queue."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.types import SchedulerOutput, StepResult

_PLAIN_STEPS = 3.0  # a step may always take as long as so many without prompts
_TARGET = 0.85  # of the limit, as step times vary
_ROUND_TO = 8  # rows of a kernel's block: a chunk of fewer rows takes as long
_MOST_SLOWDOWN = 2.0  # that one step may report: it may have been disturbed
_FIRST_CHUNK = 64  # before any time is known
_WEIGHT = 0.5  # of the newest time of a prompt token
_MANY_TOKENS = 1 << 30
_PLAIN_WEIGHT = 0.2  # of the newest time of a step without prompts


class StepTime:
    """Learns what prompt tokens cost from the steps that had some, and bounds them by time.

    The time of a step is taken as `plain + num_prompt_tokens * per_token`. Both are running means, and a chunk of half
    the size counts half. The error is small where it matters: chunks have about the size that is asked for next.

    Args:
        max_step_ms: most milliseconds of a step in which requests decode, or three steps without prompts if these take
            longer; 0 = no bound.
    """

    def __init__(self, max_step_ms: float) -> None:
        self._max_step_ms = max_step_ms
        self._plain_ms = 0.0
        self._per_token_ms = 0.0

    def max_prompt_tokens(self, most: int) -> int:
        """Return how many prompt tokens a step may hold in which requests decode, 1 .. `most`."""
        if not self._max_step_ms:
            return most
        if not self._per_token_ms:
            return min(_FIRST_CHUNK, most)
        limit_ms = _TARGET * max(self._max_step_ms, _PLAIN_STEPS * self._plain_ms)
        found = int((limit_ms - self._plain_ms) / self._per_token_ms)
        return min(max(found - found % _ROUND_TO, _ROUND_TO), most)

    def observe(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Learn from a step that has run."""
        if not self._max_step_ms:
            return
        ms = sum(result.timings_ms.values()) - result.timings_ms.get("idle", 0.0)
        if int(plan.num_new_tokens.sum()) - len(plan.draft.token_ids) == len(plan.request_ids):  # no row has more
            weight = _PLAIN_WEIGHT if self._plain_ms else 1.0
            self._plain_ms += weight * (ms - self._plain_ms)
            return
        own = plan.num_new_tokens - np.diff(plan.draft.cu_num_draft)
        is_prompt = own > 1
        num_prompt_tokens = int(own[is_prompt].sum())
        plain_ms = 0.0 if is_prompt.all() else self._plain_ms
        per_token_ms = max(ms - plain_ms, 0.1 * ms) / num_prompt_tokens
        weight = 1.0
        if self._per_token_ms:  # a few tokens say little: a step takes as long with one as with several
            weight = _WEIGHT * min(num_prompt_tokens / self.max_prompt_tokens(_MANY_TOKENS), 1.0)
            per_token_ms = min(per_token_ms, _MOST_SLOWDOWN * self._per_token_ms)
        self._per_token_ms += weight * (per_token_ms - self._per_token_ms)
