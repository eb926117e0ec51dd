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
    num_rows, verified = len(plan.request_ids), result.verified
    if result.step_id != plan.step_id or result.request_ids != plan.request_ids:
        raise InternalError(f"step result: expected the rows of step {plan.step_id}, got step {result.step_id}")
    for column in (verified.cu_num_output[1:], verified.num_accepted, result.drafts.cu_num_draft[1:]):
        if len(column) != num_rows:
            raise InternalError(f"step result: expected {num_rows} rows, got {len(column)}")
    num_drafts = plan.draft.cu_num_draft[1:] - plan.draft.cu_num_draft[:-1]
    is_due = plan.num_computed_tokens + plan.num_new_tokens - num_drafts == num_tokens
    if result.failed:
        is_due &= ~_failed_rows(plan, result)
    num_output = verified.cu_num_output[1:] - verified.cu_num_output[:-1]
    num_next = result.drafts.cu_num_draft[1:] - result.drafts.cu_num_draft[:-1]
    is_right = (num_output == (verified.num_accepted + 1) * is_due) & (verified.num_accepted <= num_drafts)
    if np.count_nonzero(is_right & (num_next <= plan.max_draft_len)) < num_rows:
        raise _disagreement(plan, verified.num_accepted, num_output, is_due, num_next)
    _check_drafts(result.drafts)


def _failed_rows(plan: SchedulerOutput, result: StepResult) -> npt.NDArray[np.bool_]:
    is_failed = np.array([request_id in result.failed for request_id in plan.request_ids])
    if is_failed.sum() != len(result.failed):
        raise InternalError(f"step result: expected failures among {plan.request_ids}, got {list(result.failed)}")
    return is_failed


def _disagreement(
    plan: SchedulerOutput, num_accepted: I32, num_output: I32, is_due: npt.NDArray[np.bool_], num_next: I32
) -> InternalError:
    """Say which of the rules about numbers was broken first."""
    if len(wrong := np.flatnonzero((num_output > 0) != is_due)):
        return InternalError(
            "step result: expected output from exactly the rows whose tokens were all run and that did not fail, got "
            f"the contrary for {', '.join(plan.request_ids[r] for r in wrong)}"
        )
    if (num_next > plan.max_draft_len).any():
        return InternalError(
            f"step result: expected at most {plan.max_draft_len.tolist()} drafts, got {num_next.tolist()}"
        )
    return InternalError(
        f"step result: expected num_accepted + 1 outputs or none, and no more accepted than drafted, got outputs "
        f"{num_output.tolist()}, accepted {num_accepted.tolist()}"
    )


def _check_drafts(drafts: DraftTokens) -> None:
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
