"""The engine: requests in, outputs out, one step at a time. Knows no processes, text or HTTP."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable
from dataclasses import replace

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.adapters import AdapterRegistry
from fastdeploy_sd.engine.async_scheduler import AsyncScheduler
from fastdeploy_sd.engine.commit import commit_result
from fastdeploy_sd.engine.connector_chain import ArrivalFds
from fastdeploy_sd.engine.draft_log import DraftLog
from fastdeploy_sd.engine.interfaces.executor import (
    AdaptingExecutor,
    Executor,
    FallibleExecutor,
    LaunchingExecutor,
    ServingExecutor,
)
from fastdeploy_sd.engine.interfaces.kv_connector import KVConnector, NoKVConnector
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.engine.scheduler import Scheduler
from fastdeploy_sd.engine.step_pipeline import StepPipeline
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.types import FinishReason, ModelInfo, Request, RequestId, RequestOutput, SchedulerOutput
from fastdeploy_sd.types.stats import EngineStats


class Engine:
    """Continuous batching over an executor. Synchronous and single-threaded: the caller drives it with `step`.

    A request that has its blocks runs at once, unless its KV comes from elsewhere, or its adapter from files: then it
    runs when that has arrived.
    One whose grammar is being compiled waits for that before it gets any.

    Every request that `submit` took ends with exactly one output that has a finish_reason, from `step` or `abort`.
    """

    def __init__(self, config: Config, executor: Executor, connector: KVConnector | None = None) -> None:
        """`connector` brings what the executor's block store lacks; both stay the caller's to shut down.

        Raises ConfigError: a configured adapter is wrong.
        """
        self._executor = executor
        connector = connector or NoKVConnector()
        reader = executor.adapters if isinstance(executor, AdaptingExecutor) else None
        self.adapters = AdapterRegistry(config.lora, reader, config.model.served_names)
        self._scheduler = Scheduler(
            config, executor.model_info, connector, executor.block_store, executor.grammars, self.adapters
        )
        self._kv_connector = self._scheduler.connector
        of_adapters = None if reader is None else reader.fd
        self._arrival_fds = ArrivalFds([self._kv_connector.fd, self._scheduler.pool.preparing.fd, of_adapters])
        # Whether `step` would run nothing until requests change or something makes `arrival_fd` readable.
        self.is_stalled = False
        self._pool = self._scheduler.pool
        self.experts = executor.expert_monitor if isinstance(executor, ServingExecutor) else None
        launcher = executor.launcher if isinstance(executor, LaunchingExecutor) else None
        self._draft_log = DraftLog(config)
        self._pipeline: StepPipeline | None = None
        if launcher is not None:
            ahead = AsyncScheduler(self._scheduler, drafts_async=launcher.drafts_async)
            self._pipeline = StepPipeline(self._scheduler, ahead, launcher)

    @property
    def model_info(self) -> ModelInfo:
        return replace(self._executor.model_info, adapters=self.adapters.known)

    def submit(self, request: Request) -> None:
        """Queue a validated request; raises as Scheduler.add."""
        self._scheduler.add(request)
        self.is_stalled = False

    def abort(self, request_ids: Iterable[RequestId], reason: FinishReason = FinishReason.ABORT) -> list[RequestOutput]:
        """End requests before the next step; what a step in flight gives for them is dropped. Unknown ids are ignored.

        Returns their last outputs, without tokens. The reason is STOP when a stop string has completed them.
        """
        self.is_stalled = False
        return self._pool.abort(request_ids, reason)

    def step(self) -> list[RequestOutput]:
        """Run the model once for the requests whose turn it is; returns new tokens and ends.

        Where the executor launches steps, this starts one and returns what the one before gave, which it waits for. The
        engine is unusable after an exception; what fails for some requests only ends these, with FinishReason.ERROR.
        """
        self._draft_log.note_step(self.stats)
        for arrival in self._kv_connector.arrivals():
            self._pool.take_arrival(arrival)
        self._pool.adapters.take_read()
        refused = self._take_prepared()
        if self._pipeline is not None:
            outputs = self._pipeline.advance()
            self.is_stalled = not self._pipeline.is_running
            return refused + outputs
        plan = self._scheduler.schedule()
        self.is_stalled = not plan.request_ids
        if self.is_stalled:
            return refused
        return refused + self._run(plan)

    def _take_prepared(self) -> list[RequestOutput]:
        """Let requests go on whose grammars are ready, and end those whose grammars cannot be compiled."""
        return [self._refuse(state, message) for state, message in self._pool.take_prepared()]

    def _refuse(self, state: RequestState, message: str) -> RequestOutput:
        metrics = self._pool.close(state, FinishReason.ERROR, time.time())
        error = (BadRequest.__name__, message)
        return replace(state.empty_output(), finish_reason=FinishReason.ERROR, error=error, metrics=metrics)

    def _run(self, plan: SchedulerOutput) -> list[RequestOutput]:
        result = self._executor.execute(plan)
        self._scheduler.observe(plan, result)
        return commit_result(self._pool, plan, result)

    def drain(self) -> None:
        """Take nothing from others than the callers of `submit`, who end by themselves. May be called twice."""

    def end(self) -> None:
        """Give up what is done for others than the callers of `submit`, whose requests were aborted."""

    def has_work(self) -> bool:
        """Whether any request has not ended, or a step is not over. `step` runs nothing while no request is ready."""
        return bool(self._pool.states) or (self._pipeline is not None and self._pipeline.is_running)

    @property
    def failure_fd(self) -> int | None:
        """Readable once nothing can be computed any more; None = only a step tells."""
        return self._executor.failure_fd if isinstance(self._executor, FallibleExecutor) else None

    @property
    def arrival_fd(self) -> int | None:
        """Readable while KV, a grammar or an adapter is there that no step has taken; None = nothing ever is."""
        return self._arrival_fds.fd

    def wait_for_arrival(self, timeout_s: float) -> None:
        """Sleep while `is_stalled`, until `arrival_fd` is readable; for callers that wait for nothing else."""
        if self.is_stalled and self.has_work() and self.arrival_fd is not None:
            poll = select.poll()
            poll.register(self.arrival_fd, select.POLLIN)
            poll.poll(timeout_s * 1e3)

    def stats(self) -> EngineStats:
        found = self._scheduler.stats()
        return found if self.experts is None else replace(found, experts=self.experts.stats())

    def check_integrity(self) -> None:
        """Verify every invariant between steps. O(tokens and blocks); for tests and the end of a server."""
        self._scheduler.check_integrity()
