"""The worker of a rank other than 0: follows rank 0's commands on the same requests, and chooses no token itself."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.device_buffers import HOST_BUFFERS
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.spec_decode.proposer import DraftProbabilities, ProposeInput, Proposer
from fastdeploy_sd.types import SchedulerOutput
from fastdeploy_sd.worker.ranks.commands import (
    Attempt,
    BeginDrafts,
    CompactPaths,
    DraftRows,
    ForgetDrafts,
    ReadAdapter,
    RunRows,
    TakeOutput,
    TakePlan,
)
from fastdeploy_sd.worker.ranks.coordinator import Collectives, LostExpertsError
from fastdeploy_sd.worker.ranks.expert_ranks import leave_experts
from fastdeploy_sd.worker.step.batch import BatchBuilder
from fastdeploy_sd.worker.step.draft_inputs import DraftInputs
from fastdeploy_sd.worker.step.forward import StepResources


class RankWorker:
    """Makes the same changes to its tables as rank 0, in the same order, and runs the same rows.

    Args:
        methods: those that run a draft model, by name. Other methods draft on rank 0 only.
        collectives: of the pass.
        experts: this rank's, where they are spread.
    """

    def __init__(
        self,
        step: StepResources,
        methods: Mapping[str, Proposer],
        collectives: Collectives,
        experts: ExpertService | None = None,
    ) -> None:
        self.collectives, self._experts = collectives, experts
        self._forward, self._memory, self._table, self._methods = step.forward, step.memory, step.table, methods
        self._prompts, self._compact_paths = step.prompts, step.compact_paths
        # Only draft models read tokens where the target runs.
        self._buffers = step.buffers if methods else HOST_BUFFERS
        self._batches = BatchBuilder(step.table, step.memory, self._buffers, step.adapters)
        self._adapters = step.adapters
        self._draft_inputs = DraftInputs(step.table, step.memory, has_target=True)
        self._plan: SchedulerOutput | None = None
        self._ran: SchedulerOutput | None = None

    def take(self, command: ReadAdapter | TakePlan | TakeOutput | BeginDrafts | ForgetDrafts) -> None:
        """Repeat what rank 0 has done. Raises Exception: this rank could not; then it must end."""
        match command:
            case ReadAdapter(load):
                assert self._adapters is not None, "adapters of a model that takes none"
                self._adapters.begin(load)
            case TakePlan(plan, refused_ids):
                self._take_plan(plan, refused_ids)
            case TakeOutput():
                m, num_rows = self._memory, len(command.cu_num_output)
                m.output_token_ids[: len(command.token_ids)] = command.token_ids
                m.cu_num_output[:num_rows] = command.cu_num_output
                self._buffers.send_output()  # draft layers read the tokens where the model runs
                self._batches.commit()
            case BeginDrafts(method, requests):
                self._methods[method].begin(requests)
            case ForgetDrafts(method, table_rows):
                self._methods[method].forget(table_rows)

    def run(self, attempt: Attempt) -> None:
        """Run rows of the step, or finish them; if that raises, nothing has changed that a further attempt reads.

        Raises LostExpertsError: a rank has not run its experts; any other error is of these rows.
        """
        try:
            self._run(attempt)
        except ValueError as error:
            if self._experts is not None and self._experts.has_lost_experts:
                raise LostExpertsError(str(error)) from error
            raise

    def _run(self, attempt: Attempt) -> None:
        if isinstance(attempt, RunRows):
            assert self._plan is not None, "rows of no plan"
            self._ran = self._plan if attempt.rows is None else self._plan.take(attempt.rows.astype(np.intp))
            self._batches.build(self._ran)
            self._forward()
            self._prompts.follow()
            # No rank begins its next attempt before all have ended this one.
            device().wait()
        elif isinstance(attempt, CompactPaths):
            m = self._memory
            m.output_rows[: len(attempt.output_rows)] = attempt.output_rows
            m.cu_num_output[: len(attempt.cu_num_output)] = attempt.cu_num_output
            self._buffers.send_output()
            self._compact_paths()
            device().wait()  # rank 0 may copy the blocks then
        else:
            self._methods[attempt.method].propose(self._draft_input(attempt))

    def drain(self) -> None:
        """Wait for the started work of a failed attempt: rank 0 may copy the blocks that it writes to.

        Called when the attempt has failed on all ranks, so none of its work waits for other ranks.
        """
        with contextlib.suppress(ValueError):  # its values are not used
            device().wait()

    def leave(self, timeout_s: float) -> None:
        """Serve this rank's experts until no other rank needs them, and for at most so long."""
        if self._experts is not None:
            leave_experts(self._experts, timeout_s)

    def _take_plan(self, plan: SchedulerOutput, refused_ids: tuple[str, ...]) -> None:
        if refused_ids:
            new = tuple(new for new in plan.new if new.request.request_id not in refused_ids)
            plan = replace(plan, new=new)
        if self._adapters is not None:
            self._adapters.load(plan.adapter_loads)
            self._adapters.take_read()  # nothing here waits for them
        for error in self._table.apply(plan).refused.values():
            raise error
        self._plan = plan

    def _draft_input(self, attempt: DraftRows) -> ProposeInput:
        """Return the input of rank 0's draft layers.

        Raises ValueError: the rows are not those of the step: the ranks' tables differ.
        """
        assert self._ran is not None, "a draft pass needs a step before it"
        x, count = self._draft_inputs.build(self._ran.request_ids), len(attempt.table_rows)
        begin = int(np.argmax(x.table_rows == attempt.table_rows[0])) if count else 0
        if not np.array_equal(x.table_rows[begin : begin + count], attempt.table_rows):
            raise ValueError(f"table_rows: expected neighbours among {x.table_rows}, got {attempt.table_rows}")
        if count < len(x.table_rows):
            x = x.slice(begin, begin + count)
        # Only rank 0 reports log-probabilities; every rank must know where drafts end.
        least = attempt.min_survival
        room = np.empty(attempt.max_draft_len.sum() if least is not None else 0, np.float32)
        limits = attempt.max_draft_len
        probabilities = None if least is None else DraftProbabilities(least, room, limits)
        return replace(x, max_draft_len=limits, num_draft_logprobs=None, probabilities=probabilities)
