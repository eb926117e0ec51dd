"""A product's engine whose model is only a time: what it plans, caches, preempts and refuses is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.cluster.workload import MAX_MODEL_LEN, OUTPUT_TOKEN, VOCAB_SIZE
from fastdeploy_sd.cluster.membership import InstanceLoad
from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.block_store import BlockStore
from fastdeploy_sd.engine.interfaces.grammars import Grammars
from fastdeploy_sd.engine.interfaces.kv_connector import KvArrival, KVConnector
from fastdeploy_sd.spec_decode.control.cost import StepTimes
from fastdeploy_sd.spec_decode.control.decision import F64, DraftTimes
from fastdeploy_sd.types import (
    EMPTY_I32,
    I32,
    DraftTokens,
    ModelInfo,
    Request,
    RequestId,
    RequestOutput,
    SchedulerOutput,
    StepResult,
    VerifyResult,
    offsets,
)

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """Milliseconds of a step: `step` + `row` for each token + `context` for each thousand tokens of contexts."""

    step: float
    row: float
    context: float
    _curve: F64 = field(default_factory=lambda: np.zeros(1 << 15))

    def times(self, num_rows: int, num_requests: int, num_kv_tokens: int) -> DraftTimes:
        return DraftTimes(self._curve, 0, self.step + self.row * num_rows + self.context * num_kv_tokens / 1000)


class TimedExecutor:
    """Says how long a step takes, and gives each request whose prompt is complete one token.

    Args:
        slowdown: factor of the times.
        host_ms: of each step, besides the model's.
    """

    block_store: BlockStore | None = None
    grammars: Grammars | None = None

    def __init__(self, model_info: ModelInfo, times: StepTimes, host_ms: float, slowdown: float) -> None:
        self._model_info = model_info
        self._times, self._host_ms, self._slowdown = times, host_ms, slowdown
        self._prompts: dict[RequestId, int] = {}  # not yet computed -> how many tokens they have
        self._results: dict[int, tuple[VerifyResult, DraftTokens]] = {}  # of steps without prompts, by rows
        self.last_ms = 0.0
        self.num_rows = 0

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    def execute(self, plan: SchedulerOutput) -> StepResult:
        for name in (*plan.finished_ids, *plan.preempted_ids):
            self._prompts.pop(name, None)
        self._prompts.update((new.request.request_id, len(new.token_ids)) for new in plan.new)
        num_rows = len(plan.request_ids)
        verified, drafts = self._decoded(num_rows)
        if self._prompts:
            due = self._due(plan)
            num_due, num_context = int(due.sum()), int(plan.num_computed_tokens @ due)
            verified = VerifyResult(verified.token_ids[:num_due], offsets(due), np.zeros(num_rows, np.int32))
        else:
            num_due, num_context = num_rows, int(plan.num_computed_tokens.sum())
        self.num_rows = int(plan.num_new_tokens.sum())
        found = self._times.times(self.num_rows, num_due, num_context)
        model_ms = self._slowdown * (float(found.curve[found.num_rows]) + found.fixed)
        self.last_ms = model_ms + self._host_ms
        return StepResult(plan.step_id, plan.request_ids, verified, drafts, timings_ms={"forward": model_ms})

    def _decoded(self, num_rows: int) -> tuple[VerifyResult, DraftTokens]:
        found = self._results.get(num_rows)
        if found is None:
            cu = np.arange(num_rows + 1, dtype=np.int32)
            zeros = np.zeros(num_rows, np.int32)
            verified = VerifyResult(np.full(num_rows, OUTPUT_TOKEN, np.int32), cu, zeros)
            found = self._results[num_rows] = verified, DraftTokens(EMPTY_I32, np.zeros(num_rows + 1, np.int32))
        return found

    def _due(self, plan: SchedulerOutput) -> I32:
        """Which rows get a token, 0 or 1, i32[R]; prompts that are complete are forgotten."""
        due = np.ones(len(plan.request_ids), np.int32)
        ends = (plan.num_computed_tokens + plan.num_new_tokens).tolist()
        for row, name in enumerate(plan.request_ids):
            length = self._prompts.get(name)
            if length is not None and ends[row] < length:
                due[row] = 0
            elif length is not None:
                del self._prompts[name]
        return due

    def shutdown(self) -> None:
        """It holds nothing."""


class KvOrders:
    """Brings the KV of a decode instance's prompts from elsewhere: `order` is called for each, and `arrive` ends it."""

    fd: int | None = None

    def __init__(self, order: Callable[[Request, int, int], None]) -> None:
        self._order = order
        self._waiting: dict[RequestId, int] = {}
        self._arrived: list[KvArrival] = []

    def begin(self, request: Request, token_ids: I32, num_cached_tokens: int, block_ids: Sequence[int]) -> bool:
        if request.kv_source is None or num_cached_tokens >= len(token_ids) - 1:
            return False
        self._waiting[request.request_id] = num_cached_tokens
        self._order(request, len(token_ids), num_cached_tokens)
        return True

    def cancel(self, request_id: RequestId) -> None:
        self._waiting.pop(request_id, None)
        self._arrived = [arrival for arrival in self._arrived if arrival.request_id != request_id]

    def arrivals(self) -> Sequence[KvArrival]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def arrive(self, request_id: RequestId, num_tokens: int | None) -> None:
        """A prompt's KV has come, for so many tokens; None = it never will."""
        num_cached = self._waiting.pop(request_id, None)
        if num_cached is not None:
            failure = "" if num_tokens is not None else "lost"
            self._arrived.append(
                KvArrival(request_id, num_cached if num_tokens is None else num_tokens, failure=failure)
            )


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What all engines of a deployment have in common."""

    config: Config
    num_blocks: int
    times: StepTimes
    host_ms: float

    def start(self, slowdown: float = 1.0, connector: KVConnector | None = None) -> SimulatedEngine:
        """Return an engine without requests."""
        info = ModelInfo("simulated", VOCAB_SIZE, MAX_MODEL_LEN, (), BLOCK_SIZE, self.num_blocks)
        executor = TimedExecutor(info, self.times, self.host_ms, slowdown)
        return SimulatedEngine(Engine(self.config, executor, connector), executor)


class SimulatedEngine:
    """An engine with the messages that have reached it in a step; its owner has the clock."""

    def __init__(self, engine: Engine, executor: TimedExecutor) -> None:
        self.engine, self.executor = engine, executor
        self.is_stepping = False
        self.num_steps = self.num_rows = 0
        self._inbox: list[Request] = []
        self._load: InstanceLoad | None = None

    def submit(self, request: Request) -> None:
        """Leave a request for the next step."""
        self._inbox.append(request)
        self._load = None

    def take_inbox(self) -> list[Request]:
        """Return the requests that have come since the last step."""
        taken, self._inbox = self._inbox, []
        return taken

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or self.engine.has_work()

    def step(self) -> list[RequestOutput]:
        """Run a step at once; `executor.last_ms` says when its outputs are there."""
        self._load = None
        outputs = self.engine.step()
        if not self.engine.is_stalled:
            self.num_steps += 1
            self.num_rows += self.executor.num_rows
        return outputs

    @property
    def load(self) -> InstanceLoad:
        """What the engine tells routers."""
        if self._load is None:
            stats = self.engine.stats()
            self._load = InstanceLoad(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting + len(self._inbox),
                max_num_seqs=stats.max_num_seqs,
                num_blocks=stats.num_blocks,
                num_available_blocks=stats.num_free_blocks + stats.num_cached_blocks,
            )
        return self._load
