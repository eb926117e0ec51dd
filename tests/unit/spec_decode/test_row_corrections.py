"""What steps take against what was measured: optimistic where nothing was seen, and known after a few."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.control.profile import CostProfile, StepSample
from tests.doubles.controller_parts import FollowedCost

NUM_ROWS = 200
ROW_MS = 0.1
# Every row takes as much, so that whatever is expected of more rows is told as it is.
MEASURED = 1.0 + ROW_MS * np.arange(NUM_ROWS + 1)
# Steps after which those before count, whether they were news or not.
MANY_STEPS = 64


def cost_model() -> FollowedCost:
    steps = [StepSample(rows, 1, 8, MEASURED.item(rows)) for rows in (1, NUM_ROWS)]
    return FollowedCost(CostProfile({}, {}, tuple(steps)), NUM_ROWS)


def run(model: FollowedCost, num_rows: int, truth: float, num_steps: int = 1) -> None:
    """Steps take `truth` times what was measured."""
    for _ in range(num_steps):
        model.observe(num_rows, 1, 8, truth * MEASURED.item(num_rows))


def over_plain(model: FollowedCost, num_rows: int) -> float:
    """The optimistic time of such steps over those of 16 rows, each over what was measured."""
    found = model.times(1, 1, 8).curve / MEASURED
    return found.item(num_rows) / found.item(16)


def known_over_plain(model: FollowedCost, num_rows: int) -> float:
    """What is known of them, without optimism."""
    known, plain = (model.expected(rows, 1, 8) / MEASURED.item(rows) for rows in (num_rows, 16))
    return known / plain


def test_what_was_measured_holds_before_a_step_was_seen() -> None:
    model = cost_model()
    assert model.times(1, 1, 8).curve[1:].tolist() == pytest.approx(MEASURED[1:].tolist())
    assert model.speed == 1.0


@pytest.mark.parametrize("speed", [0.6, 1.0, 1.7])
def test_a_machine_of_another_speed_makes_rows_never_seen_neither_slower_nor_faster(speed: float) -> None:
    model = cost_model()
    run(model, 16, speed, 2 * MANY_STEPS)
    assert model.speed == pytest.approx(speed, rel=0.01)
    assert over_plain(model, 4) == pytest.approx(1.0, abs=0.01)
    # All times of more rows are optimistic; what is known of them is what was measured.
    assert over_plain(model, 64) == pytest.approx(0.86, abs=0.015)
    assert over_plain(model, 136) == pytest.approx(over_plain(model, 64), abs=0.001)
    assert known_over_plain(model, 136) == pytest.approx(1.0, abs=1e-9)


def test_steps_below_a_stair_say_nothing_of_the_rows_above_it() -> None:
    """However many have twelve rows: what thirteen take is found out by the first steps that have them."""
    model = cost_model()
    run(model, 12, 1.0, 300)
    optimistic = model.times(1, 1, 8).curve / MEASURED
    assert optimistic.item(18) / optimistic.item(12) == pytest.approx(0.85, abs=0.01)
    assert known_over_plain(model, 18) == pytest.approx(1.0, abs=1e-9)
    run(model, 18, 1.0, 4)
    optimistic = model.times(1, 1, 8).curve / MEASURED
    assert optimistic.item(18) / optimistic.item(12) > 0.95
    assert optimistic.item(22) / optimistic.item(12) == pytest.approx(0.85, abs=0.01)


@pytest.mark.parametrize("truth", [0.8, 1.0, 1.2])
def test_a_few_steps_tell_what_so_many_rows_take(truth: float) -> None:
    model = cost_model()
    run(model, 16, 1.0, 30)
    for _ in range(10):
        run(model, 128, truth)
        run(model, 16, 1.0)
    run(model, 16, 1.0, MANY_STEPS)
    assert over_plain(model, 128) == pytest.approx(truth, rel=0.1)
    assert min(truth, 1.0) < over_plain(model, 64) + 0.02 < max(truth, 1.0) + 0.04, "between those seen"


def test_one_interrupted_step_says_little_where_many_were_seen_and_something_where_none_was() -> None:
    model = cost_model()
    for _ in range(50):
        run(model, 16, 1.0)
        run(model, 64, 1.0)
    run(model, 64, 9.0)
    run(model, 16, 1.0, MANY_STEPS)
    assert over_plain(model, 64) == pytest.approx(1.0, abs=0.02)
    run(model, 136, 9.0)
    assert 0.85 < over_plain(model, 136) < 1.1


def test_what_was_found_out_is_forgotten_and_optimistic_again() -> None:
    model = cost_model()
    run(model, 16, 1.0, 30)
    for _ in range(12):
        run(model, 128, 1.3)
        run(model, 16, 1.0)
    assert over_plain(model, 128) > 1.1
    run(model, 16, 1.0, 300)
    assert over_plain(model, 128) > 1.0
    run(model, 16, 1.0, 3000)
    assert over_plain(model, 128) == pytest.approx(0.86, abs=0.015)


@pytest.mark.parametrize("num_rows", [100, 128, NUM_ROWS])  # the last row has no octave above it
def test_a_step_of_a_rare_kind_counts_at_once(num_rows: int) -> None:
    model = cost_model()
    run(model, 16, 1.0, 30)
    before = model.expected(num_rows, 1, 8)
    run(model, num_rows, 1.1)
    assert model.expected(num_rows, 1, 8) > before
    # One more of those that are known waits for others.
    before = model.expected(16, 1, 8)
    run(model, 16, 1.1)
    assert model.expected(16, 1, 8) == before
