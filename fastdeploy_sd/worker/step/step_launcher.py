"""In-flight steps: the device runs them while the host does other work. They are finished in the order of their start.

A step may start after an in-flight one, whose tokens and next drafts only the device has. The host then prepares it as
if all drafts of the one before were accepted. Knows no scheduling.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import RequestId, SchedulerOutput, StepResult
from fastdeploy_sd.worker.ranks.coordinator import group_ended_as_error
from fastdeploy_sd.worker.step.batch import PendingRows
from fastdeploy_sd.worker.step.request_table import RequestTable
from fastdeploy_sd.worker.step.runner import LaunchedStep, ModelRunner

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Started:
    """An in-flight step.

    Attributes:
        launched: None = it was not launched, or ran on wrong tokens: `finish` runs it.
        rows: if a further step may be launched before `finish`.
    """

    plan: SchedulerOutput
    refused: Mapping[RequestId, Exception]
    launched: LaunchedStep | None = None
    rows: PendingRows | None = None


class StepLauncher:
    """See the module, and interfaces.executor.Launcher.

    Args:
        runner: of a model on a device, alone.
        table: its requests.
    """

    def __init__(self, runner: ModelRunner, table: RequestTable) -> None:
        self._runner, self._table = runner, table
        self._in_flight: list[_Started] = []

    @property
    def drafts_async(self) -> bool:
        return self._runner.drafts_async

    def start(self, plan: SchedulerOutput, *, is_open: bool) -> bool:
        with group_ended_as_error():
            return self._start(plan, is_open=is_open)

    def finish(self) -> StepResult:
        with group_ended_as_error():
            return self._finish()

    def close(self) -> None:
        """Release the model; no step may be started or finished afterwards."""
        self._in_flight.clear()
        del self._runner, self._table

    def _start(self, plan: SchedulerOutput, *, is_open: bool) -> bool:
        before = self._in_flight[-1].rows if self._in_flight else None
        refused, dropped = self._runner.update_requests(plan)
        if before is not None and len(dropped):
            before.drop(dropped)
        step, is_behind = _Started(plan, refused), any(step.launched is None for step in self._in_flight)
        self._in_flight.append(step)
        if refused or is_behind:
            return False
        try:
            is_open = is_open and self._runner.may_open(plan)
            step.launched = self._runner.launch(plan, before, is_open=is_open)
        except Exception:
            _log.exception("a step of %d requests could not be started", len(plan.request_ids))
            self._runner.restart()  # the device may have begun to append its tokens
            return False
        step.rows = step.launched.rows
        return is_open

    def _finish(self) -> StepResult:
        step = self._in_flight.pop(0)
        if step.launched is not None:
            try:
                return self._runner.finish(step.launched)
            except Exception:
                _log.exception("a step of %d requests failed; trying them apart", len(step.plan.request_ids))
                self._start_again()
        return self._runner.run_apart(self._with_known_lengths(step.plan), {**step.refused, **_dropped(step)})

    def _start_again(self) -> None:
        """Send the host's state to the device; later launched steps run again when they are finished."""
        for step in self._in_flight:
            step.launched = None
        self._runner.restart()

    def _with_known_lengths(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Return a plan with the known numbers of tokens; see `Launcher.start`."""
        return plan.with_lengths(np.array([self._table.num_tokens_of(name) for name in plan.request_ids], np.int32))


def _dropped(step: _Started) -> Mapping[RequestId, Exception]:
    """Return the requests of a step that were dropped since; new requests may have their ids."""
    if step.rows is None:
        return {}
    gone = np.flatnonzero(~step.rows.is_kept).tolist()
    return {step.plan.request_ids[r]: InternalError("the request was dropped") for r in gone}
