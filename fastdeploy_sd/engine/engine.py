"""The engine: requests in, outputs out, one step at a time. Knows no processes, text or HTTP."""

from __future__ import annotations

from collections.abc import Iterable

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.commit import commit_result
from fastdeploy_sd.engine.executor import Executor
from fastdeploy_sd.engine.scheduler import Readiness, Scheduler, always_ready
from fastdeploy_sd.engine.stats import EngineStats
from fastdeploy_sd.types import FinishReason, ModelInfo, Request, RequestId, RequestOutput


class Engine:
    """Continuous batching over an executor. Synchronous and single-threaded: the caller drives it with `step`.

    A request that has its blocks runs at once, unless `is_ready` says no: then it runs after `set_ready`.

    Every request that `submit` took ends with exactly one output that has a finish_reason, from `step` or `abort`.
    """

    def __init__(self, config: Config, executor: Executor, is_ready: Readiness = always_ready) -> None:
        """Make an engine without requests; `executor` stays the caller's to shut down.

        Args:
            is_ready: asked in `step` each time a request has got its blocks, so again after it was preempted.
        """
        self._executor = executor
        self._scheduler = Scheduler(config, executor.model_info, is_ready)
        self._pool = self._scheduler.pool

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
        return self._pool.abort(request_ids, reason)

    def set_ready(self, request_ids: Iterable[RequestId]) -> None:
        """Let requests run that have their blocks and were not ready; ids of others are ignored."""
        self._pool.set_ready(request_ids)

    def step(self) -> list[RequestOutput]:
        """Run the model once for the requests whose turn it is.

        Returns:
            New tokens and ends; empty when nothing may run or only parts of prompts were computed.

        Raises:
            Exception: whatever the executor raised, or InternalError for a result that does not answer the plan. The
                engine is then unusable. What fails for some requests ends these, with FinishReason.ERROR.
        """
        plan = self._scheduler.schedule()
        if not plan.request_ids:
            return []
        result = self._executor.execute(plan)
        return commit_result(self._pool, plan, result)

    def has_work(self) -> bool:
        """Whether any request has not ended. `step` runs nothing while none of them is ready."""
        return bool(self._pool.states)

    def stats(self) -> EngineStats:
        """A snapshot of counters, gauges and histograms."""
        return self._pool.snapshot()

    def check_integrity(self) -> None:
        """Verify every invariant between steps. O(tokens and blocks); for tests and debug mode.

        Raises:
            AssertionError: naming the broken rule.
        """
        self._pool.check_integrity()
