"""What the next step is expected to take, and what steps with drafts take beyond what was measured."""

from __future__ import annotations

import random

import pytest

from fastdeploy_sd.spec_decode.auto.cost import CostModel
from fastdeploy_sd.spec_decode.auto.next_step import NextStep
from fastdeploy_sd.spec_decode.auto_profile import CostProfile, StepSample
from fastdeploy_sd.spec_decode.step_board import StepBoard

PLAIN_MS, ROW_MS = 1.0, 0.05


def next_step() -> tuple[NextStep, StepBoard]:
    board = StepBoard(num_requests=1)
    found = NextStep(board)
    steps = [StepSample(rows, 1, 8, PLAIN_MS + ROW_MS * (rows - 1)) for rows in (1, 2, 8, 40)]
    found.model = CostModel(CostProfile({}, {}, tuple(steps)), 64)
    return found, board


def run(found: NextStep, board: StepBoard, num_drafts: int, excess_ms: float = 0.0, slowness: float = 1.0) -> None:
    board.num_tokens = 1 + num_drafts
    found.observe(1, board.num_tokens, 8, 1e-3 * slowness * (PLAIN_MS + ROW_MS * num_drafts + excess_ms))


def test_what_any_draft_costs_is_found_out_within_a_few_steps() -> None:
    found, board = next_step()
    assert found.times(1, 1, 8).any_draft == 0
    for num_drafts in (1, 3, 1, 2, 5):
        for _ in range(3):
            run(found, board, 0)
        run(found, board, num_drafts, 0.4)
    assert found.times(1, 1, 8).any_draft == 0  # in the step behind one with drafts
    run(found, board, 0)
    # A part is taken for that of so many rows, as there were no drafts without.
    assert found.times(1, 1, 8).any_draft == pytest.approx(0.35, rel=0.25)
    assert found.times(1, 1, 8).array(4)[4] == pytest.approx(PLAIN_MS + 4 * ROW_MS + 0.4, rel=0.1)


def test_steps_that_were_interrupted_say_nothing() -> None:
    found, board = next_step()
    interrupted = random.Random(0)
    for step in range(200):
        run(found, board, 2 if step % 4 == 3 else 0, 20.0 if interrupted.random() < 0.5 else 0.0)
        assert found.times(1, 1, 8).any_draft < 0.15 * PLAIN_MS or step < 20


@pytest.mark.parametrize("num_plain", [1, 6])
def test_a_machine_that_became_slower_says_nothing_of_drafts(num_plain: int) -> None:
    """Plain steps are of the time before, and those with drafts of the time behind."""
    found, board = next_step()
    for slowness in (1.0, 1.7, 1.0, 3.0):
        for _ in range(20):
            run(found, board, 0, slowness=slowness)
        for _ in range(20):
            for _ in range(num_plain):
                run(found, board, 0, slowness=slowness)
            run(found, board, 4, slowness=slowness)
            run(found, board, 4, slowness=slowness)
            run(found, board, 0, slowness=slowness)
            times = found.times(1, 1, 8).array(4)
            assert times[4] / times[0] == pytest.approx(1 + 4 * ROW_MS, rel=0.15)


def test_drafts_in_every_step_are_no_rare_kind() -> None:
    found, board = next_step()
    for _ in range(20):
        run(found, board, 0)
    for _ in range(60):
        run(found, board, 4, slowness=1.7)
    run(found, board, 0, slowness=1.7)
    assert found.times(1, 1, 8).any_draft < 0.1 * PLAIN_MS


def test_what_was_dear_once_becomes_cheap_again() -> None:
    found, board = next_step()
    for excess_ms, num_steps in ((0.4, 20), (0.0, 200)):
        for _ in range(num_steps):
            run(found, board, 0)
            run(found, board, 2, excess_ms)
    assert found.times(1, 1, 8).any_draft < 0.1


def test_what_always_was_interrupted_is_tried_again() -> None:
    found, board = next_step()
    for _ in range(8):
        run(found, board, 0)
        run(found, board, 2, 30.0)
    run(found, board, 0)
    assert 0 < found.times(1, 1, 8).any_draft < 0.75 * PLAIN_MS
    for _ in range(40):
        run(found, board, 0)
    assert found.times(1, 1, 8).any_draft == 0


def test_the_same_times_come_again_until_something_is_learned() -> None:
    found, board = next_step()
    times = found.times(1, 1, 8)
    assert found.times(1, 1, 9) is times
    for kind in range(3):
        if kind == 0:
            run(found, board, 0)
        elif kind == 1:
            found.observe_host(1, 1e-4, has_drafts=False)
        else:
            found.observe_drafting(1, 1e-5)
        assert found.times(1, 1, 9) is not times
        times = found.times(1, 1, 9)
    board.num_prompt_tokens_ahead = 10
    assert found.times(1, 1, 9).num_rows == 11
    assert found.times(1, 1, 4000) is not found.times(1, 1, 9)
