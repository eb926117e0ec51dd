"""ModelRunner: one step of the model, from plan to result. Knows no scheduling, no stop rules and no HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fastdeploy_sd.device.device_buffers import Output
from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.spec_decode.control.report import StepStats
from fastdeploy_sd.spec_decode.verify import Verifier, VerifyRule
from fastdeploy_sd.types import (
    EMPTY_I32,
    F32,
    I32,
    DraftTokens,
    LogprobArrays,
    RequestId,
    SchedulerOutput,
    StepResult,
    VerifyResult,
    offsets,
)
from fastdeploy_sd.worker.ranks.commands import CompactPaths, RunRows, TakeOutput
from fastdeploy_sd.worker.ranks.coordinator import RankCoordinator, SingleRank
from fastdeploy_sd.worker.step.batch import BatchBuilder, PendingRows
from fastdeploy_sd.worker.step.drafting import Drafting
from fastdeploy_sd.worker.step.forward import StepResources
from fastdeploy_sd.worker.step.guided_rows import GuidedRows
from fastdeploy_sd.worker.step.step_rows import run_in_parts_of


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
    prompt_logprobs: Mapping[RequestId, LogprobArrays] = field(default_factory=dict)
    embeddings: Mapping[RequestId, F32] = field(default_factory=dict)

    def report(self, stats: StepStats, verified: float, ended: float) -> None:
        """Add this step to the statistics.

        `verified`: when its tokens were known. ended: when the step before it was finished.
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


_log = logging.getLogger(__name__)

_NO_FAILURES: Mapping[RequestId, tuple[str, str]] = {}
_NO_OUTPUT = VerifyResult(EMPTY_I32, offsets([]), EMPTY_I32)
_NOT_FINITE = InternalError.__name__, "the model produced non-finite logits for this request"


class ModelRunner:
    """Runs the decoder over the KV of the requests in the table; `ranks` None = a single rank."""

    def __init__(
        self,
        step: StepResources,
        drafting: Drafting,
        rule: VerifyRule,
        guided: GuidedRows,
        ranks: RankCoordinator | None = None,
    ) -> None:
        self._forward, self._memory, self._table, self._signals = step.forward, step.memory, step.table, step.signals
        self._logits, self.prompts, self._compact_paths = step.forward.logits, step.prompts, step.compact_paths
        self._takes_trees = rule.takes_trees and not step.memory.has_states  # a state follows one text
        self._drafting, self._guided, self._ranks = drafting, guided, ranks or SingleRank()
        self._step_stats, self._ended = drafting.step_stats, time.perf_counter()
        self._batches = BatchBuilder(step.table, step.memory, step.buffers, step.adapters)
        self._adapters = step.adapters
        self._verifier = Verifier(rule, step.memory, step.table.sampling(step.memory), self._logits, step.buffers)

    def execute(self, plan: SchedulerOutput) -> StepResult:
        """Run one step; see Executor.execute.

        A row that the table refuses, or on which the step fails, fails its request. Running the step without some rows
        finds the failing ones: no request changes before its output is appended, and KV is written again to its place.
        The other requests get the same output, as no row depends on another.
        """
        refused, _ = self.update_requests(plan)
        if not plan.request_ids:
            return StepResult(plan.step_id, (), _NO_OUTPUT, DraftTokens.none(0))
        if not refused:
            try:
                return self._run(plan)
            except Exception:
                _log.exception("a step of %d requests failed; trying them apart", len(plan.request_ids))
        return self.run_apart(plan, refused)

    def run_apart(self, plan: SchedulerOutput, refused: Mapping[RequestId, Exception]) -> StepResult:
        """Run the rows that the table has accepted, in as few parts as succeed."""
        if self._signals is not None:
            self._signals.stop()
        return run_in_parts_of(plan, refused, self._run)

    def _run(self, plan: SchedulerOutput, rows: I32 | None = None) -> StepResult:
        """Run a plan whose requests the table has; raises before any of them has changed, or not at all.

        `rows`: the rows of the plan to run; None = all.
        """
        with self._ranks.attempt(lambda number: RunRows(number, rows)):
            step = self.launch(plan)
            step.wait_begin = step.launched
            verified = self._wait(step)
        return self._complete(step, *verified)

    def launch(
        self, plan: SchedulerOutput, before: PendingRows | None = None, *, is_open: bool = False
    ) -> LaunchedStep:
        """Run a plan up to its tokens, or start that on a device.

        Args:
            before: see BatchBuilder.build.
            is_open: whether another step may be launched before `finish`.
        """
        begin = time.perf_counter()
        self._batches.build(plan, before)
        built = time.perf_counter()
        with self._guided.masks():
            self._forward()
        prompt_logprobs = {plan.request_ids[r]: found for r, found in self.prompts.logprobs().items()}
        embeddings = {plan.request_ids[r]: found for r, found in self.prompts.embeddings().items()}
        computed = time.perf_counter()
        output = self._verifier.start()
        rows = self._batches.open(before) if is_open else None
        if rows is not None and self._drafting.start(rows):
            output.extend()
        m = self._memory
        sizes = m.num_tokens, m.num_requests, m.num_logits
        times = begin, built, computed, time.perf_counter()
        return LaunchedStep(plan, output, rows, *sizes, *times, prompt_logprobs=prompt_logprobs, embeddings=embeddings)

    def finish(self, step: LaunchedStep) -> StepResult:
        """Take the tokens of a launched step, and draft after them. Raises as `_run`."""
        step.wait_begin = time.perf_counter()
        with self._ranks.attempt(lambda number: RunRows(number, None)):
            verified = self._wait(step)
        return self._complete(step, *verified)

    def _wait(self, step: LaunchedStep) -> tuple[VerifyResult, tuple[int, ...]]:
        at: StepMemory | PendingRows = step.rows or self._memory
        has_reports = step.rows is None and self._table.num_reports > 0
        has_trees = step.plan.draft.parents is not None
        assert step.rows is None or not has_trees, "a step with trees is finished before the next one is launched"
        return self._verifier.finish(
            step.output, at.num_requests, at.cu_num_logits, has_reports=has_reports, has_trees=has_trees
        )

    def _complete(self, step: LaunchedStep, result: VerifyResult, failed_rows: tuple[int, ...]) -> StepResult:
        """Commit the output of a step, and draft after it."""
        plan, verified = step.plan, time.perf_counter()
        if result.nodes is not None:
            rows = self._memory.output_rows[: len(result.token_ids)]
            with self._ranks.attempt(lambda number: CompactPaths(number, rows, result.cu_num_output)):
                self._compact_paths()
        failures = {
            plan.request_ids[r]: self._guided.failure(r, self._logits) or _NOT_FINITE
            for r in failed_rows
            if not self._guided.is_late(r)
        }
        committed = None
        if step.rows is None:
            self._batches.commit()
        else:
            committed = self._batches.commit_pending(step.rows, result)
        self._guided.advance(result)
        self._ranks.post(TakeOutput(result.token_ids, result.cu_num_output))
        step.report(self._step_stats, verified, self._ended)
        drafts = self._drafting.finish(plan.request_ids, step.rows, result, committed)
        if not self._takes_trees:
            drafts = drafts.chains()
        drafted = self._ended = time.perf_counter()
        return StepResult(
            step_id=plan.step_id,
            request_ids=plan.request_ids,
            verified=result,
            drafts=drafts,
            failed=failures or _NO_FAILURES,
            timings_ms=step.timings_ms(verified, drafted),
            choice=self._step_stats.report,
            skip_draft_steps=self._step_stats.skip_draft_steps,
            held=self._guided.held(plan.request_ids),
            prompt_logprobs=step.prompt_logprobs,
            embeddings=step.embeddings,
        )

    def update_requests(self, plan: SchedulerOutput) -> tuple[Mapping[RequestId, Exception], I32]:
        """Add the plan's new requests to the table, the grammars and the drafting method, and remove ended ones.

        Returns:
            The refused requests, and the freed table rows i32[n].
        """
        unmatched = self._guided.admit(plan.new)
        taken = plan
        if unmatched:
            taken = replace(plan, new=tuple(new for new in plan.new if new.request.request_id not in unmatched))
        if self._adapters is not None:
            self._adapters.load(plan.adapter_loads)
        changes = self._table.apply(taken)
        refused = {**unmatched, **changes.refused}
        self._ranks.take_plan(plan, tuple(refused))
        self._guided.update(changes.dropped, changes.added)
        self._drafting.update_requests(plan, changes)
        return refused, changes.dropped

    @property
    def drafts_async(self) -> bool:
        return self._drafting.is_async

    def may_open(self, plan: SchedulerOutput) -> bool:
        """Whether a step whose requests the table has can be open.

        What trees stored is moved at its end. A recurrent state that moved on by wrong tokens could not be taken back.
        """
        is_fixed = self._memory.has_states or plan.draft.parents is not None
        return not is_fixed and self._drafting.allows_pending(plan.request_ids)

    def restart(self) -> None:
        """Send the host's state to the device: launched steps have run on wrong tokens, or not at all."""
        self._table.send_all()
        self._drafting.restart()

    def close(self) -> None:
        """End the threads of grammars and adapters, and let the drafting method save its state."""
        self._guided.close()
        if self._adapters is not None:
            self._adapters.close()
        self._drafting.close()
