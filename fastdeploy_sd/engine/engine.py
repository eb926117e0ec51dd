"""The engine: requests in, outputs out, one step at a time. Knows no processes, text or HTTP."""

from __future__ import annotations

from collections.abc import Iterable

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.executor import Executor
from fastdeploy_sd.engine.scheduler import Scheduler
from fastdeploy_sd.engine.stats import EngineStats
from fastdeploy_sd.types import FinishReason, ModelInfo, Request, RequestId, RequestOutput


class Engine:
    """Continuous batching over an executor. Synchronous and single-threaded: the caller drives it with `step`.

    Every request that `submit` took ends with exactly one output that has a finish_reason, from `step` or `abort`.
    """

    def __init__(self, config: Config, executor: Executor) -> None:
        """Make an engine without requests; `executor` stays the caller's to shut down."""
        self._executor = executor
        self._scheduler = Scheduler(config, executor.model_info)

    @property
    def model_info(self) -> ModelInfo:
        """What the executor has loaded."""
        return self._executor.model_info

    def submit(self, request: Request) -> None:
        """Queue a validated request.

        Raises:
            BadRequest: its id is in use, or it could never run with this cache or step budget.
            Overloaded: the queue is full.
        """
        self._scheduler.add(request)

    def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT) -> list[RequestOutput]:
        """End requests before the next step.

        Args:
            reason: STOP when a stop string, which only whoever reads the text can see, has completed them.

        Returns:
            Their last outputs (with that finish_reason, no tokens). Ids that are unknown or have ended are ignored.
        """
        return self._scheduler.abort(request_ids, reason)

    def step(self) -> list[RequestOutput]:
        """Run the model once for the requests whose turn it is.

        Returns:
            New tokens and ends; empty when there is no work or only parts of prompts were computed.

        Raises:
            Exception: whatever the executor raised, or InternalError for a result that does not answer the plan. The
                engine is then unusable. What fails for some requests ends these, with FinishReason.ERROR.
        """
        plan = self._scheduler.schedule()
        if not plan.request_ids:
            return []
        result = self._executor.execute(plan)
        return self._scheduler.commit(plan, result)

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return self._scheduler.has_work()

    def stats(self) -> EngineStats:
        """A snapshot of counters, gauges and histograms."""
        return self._scheduler.stats()

    def check_integrity(self) -> None:
        """Verify every invariant between steps. O(tokens and blocks); for tests and debug mode.

        Raises:
            AssertionError: naming the broken rule.
        """
        self._scheduler.check_integrity()
