"""Budgets of masks, in seconds of a clock that the tests drive."""

from __future__ import annotations

import pytest

from fastdeploy_sd.text.guidance.limits import DEBT_S, REQUEST_S, STEP_S, MaskCost, share_s


@pytest.mark.parametrize(("num_requests", "share"), [(0, STEP_S), (1, STEP_S), (4, STEP_S / 4), (1000, REQUEST_S)])
def test_requests_share_a_step_and_each_has_a_least_part(num_requests: int, share: float) -> None:
    assert share_s(num_requests) == share


def test_first_the_drafts_go_then_the_step() -> None:
    cost = MaskCost()
    assert cost.max_rows(STEP_S) > 1000
    rows = []
    for milliseconds in (0.1, 4, 9, 15, 21):
        cost.note(5, 5 * milliseconds / 1e3)
        rows.append(cost.max_rows(STEP_S))
    assert rows == [200, 5, 2, 1, 0]
    assert cost.max_rows(share_s(100)) == 0


def test_a_dear_mask_is_remembered_for_a_while() -> None:
    cost = MaskCost()
    cost.note(1, 10 * STEP_S)
    num_late = 0
    while cost.max_rows(STEP_S) == 0:
        cost.note(1, 0.0)
        num_late += 1
    assert num_late == 18


def test_what_is_within_a_steps_part_per_token_never_adds_up_and_more_does() -> None:
    cost = MaskCost()
    for _ in range(10_000):
        cost.note(4, 4 * STEP_S, num_tokens=4)
    assert not cost.is_too_much
    num_dear = 0
    while not cost.is_too_much:
        cost.note(1, 0.1)
        num_dear += 1
    assert DEBT_S / 0.1 < num_dear < DEBT_S / 0.1 * 1.5
