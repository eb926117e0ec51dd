"""Runs a step in parts, and merges their results. Knows no model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fastdeploy_sd.errors import FdsdError, InternalError
from fastdeploy_sd.spec_decode.bisection import run_in_parts
from fastdeploy_sd.types import (
    F32,
    I32,
    DraftTokens,
    LogprobArrays,
    RequestId,
    Rows,
    SchedulerOutput,
    StepResult,
    VerifyResult,
)

_log = logging.getLogger(__name__)


def run_in_parts_of(
    plan: SchedulerOutput,
    refused: Mapping[RequestId, Exception],
    run: Callable[[SchedulerOutput, I32], StepResult],
) -> StepResult:
    """Run the rows of a plan in as few parts as succeed; a row that fails alone fails its request.

    Args:
        refused: requests of the plan that are not run.
        run: runs a part of the plan, given its rows i32[n].
    """
    rows = np.array([r for r, request_id in enumerate(plan.request_ids) if request_id not in refused], np.intp)
    failed, results = dict(refused), list[tuple[Rows, StepResult]]()

    def run_rows(begin: int, end: int) -> StepResult:
        return run(plan.take(rows[begin:end]), rows[begin:end].astype(np.int32)).kept()

    for part in run_in_parts(run_rows, 0, len(rows)):
        if part.result is not None:
            results.append((rows[part.begin : part.end], part.result))
        elif part.error is not None:
            failed[plan.request_ids[rows[part.begin]]] = part.error
    for request_id, error in failed.items():
        _log.error("request %s failed: %r", request_id, error)
    return merge_results(plan, results, {request_id: described(error) for request_id, error in failed.items()})


def merge_results(
    plan: SchedulerOutput, parts: Sequence[tuple[Rows, StepResult]], failed: Mapping[RequestId, tuple[str, str]]
) -> StepResult:
    """Return the result of a plan.

    Args:
        parts: rows of the plan, intp[n] each and rising, and their results.
        failed: the plan's other requests, and why.
    """
    num_rows = len(plan.request_ids)
    timings_ms: dict[str, float] = {}
    choice, skip_draft_steps = None, 0
    all_failed, held = dict(failed), frozenset[RequestId]()
    prompt_logprobs: dict[RequestId, LogprobArrays] = {}
    embeddings: dict[RequestId, F32] = {}
    for _, part in parts:
        all_failed |= part.failed
        held |= part.held
        prompt_logprobs |= part.prompt_logprobs
        embeddings |= part.embeddings
        choice, skip_draft_steps = part.choice, part.skip_draft_steps  # as things are after the last part
        for phase, milliseconds in part.timings_ms.items():
            timings_ms[phase] = timings_ms.get(phase, 0.0) + milliseconds
    return StepResult(
        plan.step_id,
        plan.request_ids,
        VerifyResult.merge(num_rows, [(rows, part.verified) for rows, part in parts]),
        DraftTokens.merge(num_rows, [(rows, part.drafts) for rows, part in parts]),
        all_failed,
        timings_ms,
        choice,
        skip_draft_steps,
        held,
        prompt_logprobs,
        embeddings,
    )


def described(error: Exception) -> tuple[str, str]:
    """Return the error text for the client of a failed request; the log has the details."""
    if isinstance(error, FdsdError):
        return type(error).__name__, error.message
    return InternalError.__name__, "the computation failed for this request"
