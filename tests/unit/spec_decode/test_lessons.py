"""What steps teach, at once or some later: the guard knows what they brought in any case."""

from __future__ import annotations

import random

import pytest

from fastdeploy_sd.spec_decode.auto.cost import CostModel
from fastdeploy_sd.spec_decode.auto.guard import Guard
from fastdeploy_sd.spec_decode.auto.lessons import Lessons, NextStepNotes, StepRecord, step_over
from fastdeploy_sd.spec_decode.auto.next_step import NextStep
from fastdeploy_sd.spec_decode.auto_profile import CostProfile, StepSample
from fastdeploy_sd.spec_decode.step_board import StepBoard

PLAIN_MS, ROW_MS = 1.0, 0.05


def lessons() -> tuple[Lessons, NextStep, Guard]:
    times, guard = NextStep(StepBoard(num_requests=2)), Guard()
    steps = [StepSample(rows, 1, 8, PLAIN_MS + ROW_MS * (rows - 1)) for rows in (1, 2, 8, 40)]
    times.model = CostModel(CostProfile({}, {}, tuple(steps)), 64)
    return Lessons(times, guard), times, guard


def some_steps(count: int) -> list[StepRecord]:
    source = random.Random(0)
    steps = []
    for i in range(count):
        num_drafts = 0 if i % 5 == 0 else source.randrange(1, 9)
        seconds = 1e-3 * (PLAIN_MS + ROW_MS * num_drafts) * source.choice([1.0, 1.1, 1.7])
        board = StepBoard(num_tokens=2 + num_drafts, num_requests=2, seconds=seconds, host_seconds=1e-4)
        notes = NextStepNotes(100 + 4 * i, 2e-5, 2e-5 if num_drafts else 0.0, 1.2e-3, 1.3)
        num_kv_tokens = notes.num_kv_tokens + 2 + source.randrange(num_drafts + 1)
        steps.append(step_over(board, notes, num_kv_tokens, is_alone=True, goes_on=True))
    return steps


def test_what_was_put_off_is_learned_as_if_it_had_not_been() -> None:
    now, now_times, now_guard = lessons()
    later, later_times, later_guard = lessons()
    for i, step in enumerate(some_steps(200)):
        now.learn(step)
        later.learn(step, put_off=i % 4 != 3)
        assert later.num_put_off == (i + 1) % 4
        assert later_guard.least_gain(2) == now_guard.least_gain(2)
        if later.num_put_off == 0:
            assert now_times.times(2, 2, 600).array(8).tolist() == later_times.times(2, 2, 600).array(8).tolist()
            assert now.predicted_s == pytest.approx(later.predicted_s, rel=1e-12)
    assert now_guard.gain == later_guard.gain > 0


def test_times_do_not_change_while_steps_are_put_off() -> None:
    later, times, guard = lessons()
    steps = some_steps(12)
    for step in steps[:8]:
        later.learn(step)
    before = times.times(2, 2, 600)
    for step in steps[8:]:
        later.learn(step, put_off=True)
        assert times.times(2, 2, 600) is before
    assert guard.gain == 0  # so few steps with drafts tell nothing yet, but they count
    later.catch_up()
    assert later.num_put_off == 0
    assert times.times(2, 2, 600) is not before


def test_a_step_says_what_it_brought_only_where_that_is_known() -> None:
    board = StepBoard(num_tokens=7, num_requests=3, num_forbidden=1)
    found = step_over(board, NextStepNotes(num_kv_tokens=100), 104, is_alone=True, goes_on=True)
    assert (found.num_drafts, found.num_new) == (4, 5)  # and one token of the request that forbids drafts
    for is_alone, goes_on, is_certain in ((False, True, False), (True, False, False), (True, True, True)):
        notes = NextStepNotes(num_kv_tokens=100, is_certain=is_certain)
        assert step_over(board, notes, 104, is_alone=is_alone, goes_on=goes_on).num_new == 0
    board.num_prompt_tokens = 4
    assert step_over(board, NextStepNotes(), 104, is_alone=False, goes_on=True).num_drafts == 0
