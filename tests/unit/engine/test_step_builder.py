from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.engine.requests.request_counters import RequestCounters
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.engine.step_builder import StepBuilder
from fastdeploy_sd.types import SpeculationInfo
from tests.doubles.engines import toy_request


def step_of(budget: int, *sizes: tuple[int, int], counters: RequestCounters | None = None) -> StepBuilder:
    """A step of requests that want (their own tokens, drafts)."""
    counters = RequestCounters() if counters is None else counters
    states = [
        RequestState(toy_request(f"r{i}", [2], 20), (0, i), 1.0, SpeculationInfo(), counters) for i in range(len(sizes))
    ]
    rows, num_new = np.array([state.counter_row for state in states]), [own + drafts for own, drafts in sizes]
    return StepBuilder(budget, states, rows, num_new, [drafts for _, drafts in sizes])


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
    step = step_of(budget, (1, 3), (5, 0), (1, 4))
    assert step.budget < 0
    step.cut_to_budget()
    assert step.budget == 0
    assert [(new - drafts, drafts) for new, drafts in zip(step.num_new, step.num_draft, strict=True)] == rows
    assert [state.counter_row for state in step.states] == step.counter_rows.tolist()
    assert len(step.states) == len(rows)


def test_a_row_that_is_taken_back_gives_its_tokens_back() -> None:
    step = step_of(20, (1, 3), (5, 0), (1, 4))
    middle, last = step.states[1:]
    step.remove(middle)
    assert (step.budget, step.num_new, step.num_draft) == (11, [4, 5], [3, 4])
    assert step.states[-1] is last
    step.remove(middle)
    assert step.budget == 11
    step.add(middle, 5, 0)
    assert (step.budget, step.num_new, step.num_draft) == (6, [4, 5, 5], [3, 4, 0])
    step.remove(middle)
    step.add(middle, 1, 2)
    assert (step.budget, step.num_new, step.num_draft) == (8, [4, 5, 3], [3, 4, 2])
    assert [state.counter_row for state in step.states] == step.counter_rows.tolist()


def test_few_rows_may_draft_what_they_may_among_many() -> None:
    rng = np.random.default_rng(0)
    counters = RequestCounters()
    many = step_of(0, *((int(own), int(drafts)) for own, drafts in rng.integers(1, 4, (64, 2))), counters=counters)
    rows = many.counter_rows
    counters.num_tokens[rows] = rng.integers(1, 6, 64)
    own = np.array(many.num_new) - many.num_draft
    counters.num_computed_tokens[rows] = counters.num_tokens[rows] - own * rng.integers(1, 3, 64)
    counters.max_total_tokens[rows] = counters.num_tokens[rows] + rng.integers(0, 9, 64)
    counters.max_draft_tokens[rows] = rng.integers(0, 9, 64)
    lengths = many.max_draft_len(counters, 5)
    assert set(lengths.tolist()) == set(range(6))
    for r, state in enumerate(many.states):
        one = StepBuilder(0, [state], rows[r : r + 1], many.num_new[r : r + 1], many.num_draft[r : r + 1])
        assert one.max_draft_len(counters, 5).tolist() == [lengths[r]]
