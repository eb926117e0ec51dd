from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fastdeploy_sd.engine.result_rules import verify_result
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import DraftTokens, SchedulerOutput, StepResult, VerifyResult
from fastdeploy_sd.types.draft_methods import DraftSource
from tests.values import i32

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
WHY = ("InternalError", "why")
# All of a's tokens run, b's prompt goes on.
NUM_TOKENS = [6, 9]
RESULT = StepResult(
    4, ("a", "b"), VerifyResult(i32(7, 9), i32(0, 2, 2), i32(1, 0)), DraftTokens(i32(3, 4), i32(0, 2, 2))
)


def with_verified(*, cu: np.ndarray, accepted: np.ndarray) -> StepResult:
    return dataclasses.replace(RESULT, verified=VerifyResult(i32(*range(cu[-1])), cu, accepted))


def with_drafts(
    *, token_ids: np.ndarray | None = None, sources: list[int] | None = None, parents: np.ndarray | None = None
) -> StepResult:
    drafts = dataclasses.replace(
        RESULT.drafts,
        token_ids=RESULT.drafts.token_ids if token_ids is None else token_ids,
        sources=None if sources is None else np.array(sources, np.int8),
        parents=parents,
    )
    return dataclasses.replace(RESULT, drafts=drafts)


def test_an_answer_to_the_plan_passes() -> None:
    assert verify_result(PLAN, RESULT, NUM_TOKENS)[1] == {}
    assert verify_result(PLAN, with_drafts(sources=[0, 3]), NUM_TOKENS)[1] == {}
    assert verify_result(PLAN, with_drafts(parents=i32(-1, 0)), NUM_TOKENS)[1] == {}
    no_output = with_verified(cu=i32(0, 0, 0), accepted=i32(0, 0))
    assert verify_result(PLAN, dataclasses.replace(no_output, failed={"a": WHY}), NUM_TOKENS)[1] == {}


@pytest.mark.parametrize(
    ("result", "failed", "message"),
    [
        (
            with_verified(cu=i32(0, 3, 3), accepted=i32(1, 0)),
            ["a"],
            "at most 2 drafts, got 3 outputs and 1 acc",
        ),
        (with_verified(cu=i32(0, 4, 4), accepted=i32(3, 0)), ["a"], "at most 2 drafts, got 4 outputs and 3 accepted"),
        (
            with_verified(cu=i32(0, 0, 0), accepted=i32(0, 0)),
            ["a"],
            "num_accepted + 1 outputs of at most 2 drafts",
        ),
        (with_verified(cu=i32(0, 2, 3), accepted=i32(1, 0)), ["b"], "expected no output, got 1 outputs"),
        (with_verified(cu=i32(0, 0, 1), accepted=i32(0, 0)), ["a", "b"], ""),
        (dataclasses.replace(RESULT, failed={"a": WHY}), ["a"], "expected no output, got 2 outputs"),
        (dataclasses.replace(RESULT, drafts=DraftTokens(i32(1, 2, 3), i32(0, 3, 3))), ["a"], "at most 2 drafts, got 3"),
        (dataclasses.replace(RESULT, drafts=DraftTokens(i32(1), i32(0, 0, 1))), ["b"], "at most 0 drafts, got 1"),
        (with_drafts(parents=i32(-1, 1)), ["a"], "each follow an earlier one or -1, got the parents [-1, 1]"),
    ],
)
def test_a_row_that_breaks_a_rule_fails_its_request_only(result: StepResult, failed: list[str], message: str) -> None:
    rows, broken = verify_result(PLAN, result, NUM_TOKENS)
    assert sorted(broken) == failed
    assert all(kind == "InternalError" and message in text for kind, text in broken.values())
    assert rows.num_output == [0 if "a" in failed else 2, 0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (dataclasses.replace(RESULT, step_id=3), "step 4, got step 3"),
        (dataclasses.replace(RESULT, request_ids=("b", "a")), "rows of step 4"),
        (with_verified(cu=i32(0, 2), accepted=i32(1)), "expected 2 rows, got 1"),
        (dataclasses.replace(RESULT, failed={"c": WHY}), r"failures among \('a', 'b'\), got \['c'\]"),
        (with_drafts(sources=[1]), rf"a source in 0..{len(DraftSource) - 1} for each of 2 drafts, got \[1\]"),
        (with_drafts(sources=[1, len(DraftSource)]), rf"got \[1, {len(DraftSource)}\]"),
        (with_drafts(sources=[-1, 0]), r"got \[-1, 0\]"),
        (with_drafts(token_ids=i32(3, 4, 5)), "expected 2 drafts, got 3"),
    ],
)
def test_a_result_that_is_no_answer_is_refused(result: StepResult, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        verify_result(PLAN, result, NUM_TOKENS)
