"""Whether a step's result answers its plan. A few array comparisons per step, independent of the number of tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import I32, DraftSource, DraftTokens, SchedulerOutput, StepResult


def check_result(plan: SchedulerOutput, result: StepResult, num_tokens: I32) -> None:
    """Refuse a result that would corrupt the books.

    Rules: same step and rows; a row whose committed tokens were all run, and which did not fail, has `num_accepted + 1`
    outputs, at most one more than it had drafts; any other row has none; at most `max_draft_len` drafts follow, each
    with a known source.

    Args:
        num_tokens: i32[R], committed tokens of the plan's rows.

    Raises:
        InternalError: naming the rule and the numbers.
    """
    if result.step_id != plan.step_id or result.request_ids != plan.request_ids:
        raise InternalError(f"step result: expected the rows of step {plan.step_id}, got step {result.step_id}")
    num_output = np.diff(result.verified.cu_num_output)
    num_accepted = result.verified.num_accepted
    if len(num_output) != len(plan.request_ids) or len(num_accepted) != len(num_output):
        raise InternalError(f"step result: expected {len(plan.request_ids)} rows, got {len(num_output)}")
    has_output = num_output > 0
    _check_answered(plan, result, num_tokens, has_output)
    if ((num_output - 1 != num_accepted) & has_output).any() or (num_accepted > np.diff(plan.draft.cu_num_draft)).any():
        raise InternalError(
            f"step result: expected num_accepted + 1 outputs or none, and no more accepted than drafted, got outputs "
            f"{num_output.tolist()}, accepted {num_accepted.tolist()}"
        )
    _check_drafts(plan, result.drafts)


def _check_answered(
    plan: SchedulerOutput, result: StepResult, num_tokens: I32, has_output: npt.NDArray[np.bool_]
) -> None:
    end = plan.num_computed_tokens + plan.num_new_tokens - np.diff(plan.draft.cu_num_draft)
    is_due = end == num_tokens
    if result.failed:
        is_failed = np.array([request_id in result.failed for request_id in plan.request_ids])
        if is_failed.sum() != len(result.failed):
            raise InternalError(f"step result: expected failures among {plan.request_ids}, got {list(result.failed)}")
        is_due &= ~is_failed
    if (has_output != is_due).any():
        names = [plan.request_ids[r] for r in np.flatnonzero(has_output != is_due)]
        raise InternalError(
            "step result: expected output from exactly the rows whose tokens were all run and that did not fail, got "
            f"the contrary for {', '.join(names)}"
        )


def _check_drafts(plan: SchedulerOutput, drafts: DraftTokens) -> None:
    num_draft = np.diff(drafts.cu_num_draft)
    if len(num_draft) != len(plan.request_ids) or (num_draft > plan.max_draft_len).any():
        raise InternalError(
            f"step result: expected at most {plan.max_draft_len.tolist()} drafts, got {num_draft.tolist()}"
        )
    if len(drafts.token_ids) != drafts.cu_num_draft[-1]:
        raise InternalError(f"step result: expected {drafts.cu_num_draft[-1]} drafts, got {len(drafts.token_ids)}")
    sources = drafts.sources
    if sources is None or len(drafts.token_ids) == 0:
        return
    if len(sources) != len(drafts.token_ids) or sources.min() < 0 or sources.max() >= len(DraftSource):
        raise InternalError(
            f"step result: expected a source in 0..{len(DraftSource) - 1} for each of {len(drafts.token_ids)} drafts, "
            f"got {sources.tolist()}"
        )
