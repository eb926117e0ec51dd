from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fastdeploy_sd.engine.result_check import check_result
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import DraftTokens, SchedulerOutput, StepResult, VerifyResult


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


PLAN = SchedulerOutput(
    step_id=4,
    request_ids=("a", "b"),
    new=(),
    deltas=(),
    num_computed_tokens=i32(5, 0),
    num_new_tokens=i32(3, 4),
    draft=DraftTokens(i32(7, 8), i32(0, 2, 2)),
    max_draft_len=i32(2, 0),
)
# All of a's tokens run, b's prompt goes on.
NUM_TOKENS = i32(6, 9)
RESULT = StepResult(
    4, ("a", "b"), VerifyResult(i32(7, 9), i32(0, 2, 2), i32(1, 0)), DraftTokens(i32(3, 4), i32(0, 2, 2))
)


def with_verified(*, cu: np.ndarray, accepted: np.ndarray) -> StepResult:
    return dataclasses.replace(RESULT, verified=VerifyResult(i32(*range(cu[-1])), cu, accepted))


def with_drafts(*, token_ids: np.ndarray | None = None, sources: list[int] | None = None) -> StepResult:
    drafts = dataclasses.replace(
        RESULT.drafts,
        token_ids=RESULT.drafts.token_ids if token_ids is None else token_ids,
        sources=None if sources is None else np.array(sources, np.int8),
    )
    return dataclasses.replace(RESULT, drafts=drafts)


def test_an_answer_to_the_plan_passes() -> None:
    check_result(PLAN, RESULT, NUM_TOKENS)
    check_result(PLAN, with_drafts(sources=[0, 3]), NUM_TOKENS)
    no_output = with_verified(cu=i32(0, 0, 0), accepted=i32(0, 0))
    check_result(PLAN, dataclasses.replace(no_output, failed={"a": "why"}), NUM_TOKENS)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (dataclasses.replace(RESULT, step_id=3), "step 4, got step 3"),
        (dataclasses.replace(RESULT, request_ids=("b", "a")), "rows of step 4"),
        (with_verified(cu=i32(0, 2), accepted=i32(1)), "expected 2 rows, got 1"),
        (with_verified(cu=i32(0, 3, 3), accepted=i32(1, 0)), "num_accepted [+] 1 outputs"),
        (with_verified(cu=i32(0, 4, 4), accepted=i32(3, 0)), "no more accepted than drafted"),
        (with_verified(cu=i32(0, 0, 0), accepted=i32(0, 0)), "the contrary for a$"),
        (with_verified(cu=i32(0, 2, 3), accepted=i32(1, 0)), "the contrary for b$"),
        (with_verified(cu=i32(0, 0, 1), accepted=i32(0, 0)), "the contrary for a, b$"),
        (dataclasses.replace(RESULT, failed={"a": "why"}), "the contrary for a$"),
        (dataclasses.replace(RESULT, failed={"c": "why"}), r"failures among \('a', 'b'\), got \['c'\]"),
        (dataclasses.replace(RESULT, drafts=DraftTokens(i32(1, 2, 3), i32(0, 3, 3))), "at most .2, 0. drafts"),
        (dataclasses.replace(RESULT, drafts=DraftTokens(i32(1), i32(0, 0, 1))), "at most .2, 0. drafts"),
        (with_drafts(sources=[1]), r"a source in 0..3 for each of 2 drafts, got \[1\]"),
        (with_drafts(sources=[1, 4]), r"got \[1, 4\]"),
        (with_drafts(sources=[-1, 0]), r"got \[-1, 0\]"),
        (with_drafts(token_ids=i32(3, 4, 5)), "expected 2 drafts, got 3"),
    ],
)
def test_anything_else_is_refused(result: StepResult, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check_result(PLAN, result, NUM_TOKENS)
