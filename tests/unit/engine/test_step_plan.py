from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.engine.columns import RequestColumns
from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.engine.step_plan import StepPlan
from fastdeploy_sd.types import SpeculationInfo
from tests.doubles.engines import toy_request


def plan_of(budget: int, *wishes: tuple[int, int]) -> StepPlan:
    """A plan of requests that want (their own tokens, drafts)."""
    columns = RequestColumns(4)
    states = [
        RequestState(toy_request(f"r{i}", [2], 20), (0, i), 1.0, SpeculationInfo(), columns) for i in range(len(wishes))
    ]
    rows, num_new = np.array([state.row for state in states]), [own + drafts for own, drafts in wishes]
    return StepPlan(budget, states, rows, num_new, [drafts for _, drafts in wishes])


@pytest.mark.parametrize(
    ("budget", "rows"),
    [
        (9, [(1, 3), (5, 0)]),
        (8, [(1, 3), (4, 0)]),
        (5, [(1, 3), (1, 0)]),
        (4, [(1, 3)]),
        (3, [(1, 2)]),
        (1, [(1, 0)]),
    ],
)
def test_the_budget_goes_to_the_first_rows_and_to_their_own_tokens_first(
    budget: int, rows: list[tuple[int, int]]
) -> None:
    plan = plan_of(budget, (1, 3), (5, 0), (1, 4))
    assert plan.budget < 0
    plan.cut_to_budget()
    assert plan.budget == 0
    assert [(new - drafts, drafts) for new, drafts in zip(plan.num_new, plan.num_draft, strict=True)] == rows
    assert [state.row for state in plan.states] == plan.rows.tolist()
    assert len(plan.states) == len(rows)


def test_a_row_that_is_taken_back_gives_its_tokens_back() -> None:
    plan = plan_of(20, (1, 3), (5, 0), (1, 4))
    middle, last = plan.states[1:]
    plan.remove(middle)
    assert (plan.budget, plan.num_new, plan.num_draft) == (11, [4, 5], [3, 4])
    assert plan.states[-1] is last
    plan.remove(middle)
    assert plan.budget == 11
    plan.add(middle, 5)
    assert (plan.budget, plan.num_new, plan.num_draft) == (6, [4, 5, 5], [3, 4, 0])
    assert [state.row for state in plan.states] == plan.rows.tolist()
