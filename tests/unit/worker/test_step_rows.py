"""The result of a step that was run in parts."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.types import ChoiceReport, DraftTokens, SchedulerOutput, StepResult, VerifyResult
from fastdeploy_sd.worker.step.step_rows import merge_results
from tests.values import i32


def test_the_last_part_says_what_the_drafting_method_is_about_to_do() -> None:
    plan = SchedulerOutput(
        7, ("a", "b", "c"), (), (), i32(5, 5, 5), i32(1, 1, 1), DraftTokens.none(3), i32(4, 4, 4)
    )  # fmt: skip
    reports = [ChoiceReport(1.0), ChoiceReport(2.0)]
    parts = [
        (
            np.array([row]),
            StepResult(
                7, (name,), VerifyResult(i32(token_id), i32(0, 1), i32(0)), DraftTokens.none(1), {}, {"draft": 1.0},
                report, skip_draft_steps,
            ),
        )
        for row, name, token_id, report, skip_draft_steps in ((0, "a", 30, reports[0], 9), (2, "c", 32, reports[1], 3))
    ]  # fmt: skip
    merged = merge_results(plan, parts, {"b": ("InternalError", "why")})
    assert merged.skip_draft_steps == 3
    assert merged.choice is reports[1]
    assert merged.timings_ms == {"draft": 2.0}
    assert [merged.verified.row(r).tolist() for r in range(3)] == [[30], [], [32]]
    assert set(merged.failed) == {"b"}
