"""What steps take: between measured times, beyond them, and after steps that took something else."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.spec_decode.control.cost import LinearCost
from fastdeploy_sd.spec_decode.control.decision import MAX_STEP_DRAFTS
from fastdeploy_sd.spec_decode.control.profile import CostProfile, StepSample
from tests.doubles.controller_parts import FollowedCost


def profile(*steps: tuple[int, int, int, float]) -> CostProfile:
    """Steps of (rows, requests, context, ms)."""
    return CostProfile({}, {}, tuple(StepSample(*step) for step in steps))


# A stair between 4 and 5 rows, and every row after 8 costs the same.
STAIR = profile((1, 1, 10, 1.0), (4, 1, 10, 1.0), (5, 1, 10, 2.0), (8, 1, 10, 2.0), (16, 1, 10, 4.0))


def test_linear() -> None:
    assert LinearCost(0.1).times(1, 1, 99).array(2).tolist() == pytest.approx([1.0, 1.1, 1.2])
    assert LinearCost(0.5).times(3, 3, 0).array(0).tolist() == [2.0]
    assert len(LinearCost(0.1).times(1, 1, 0).array(10**6)) == MAX_STEP_DRAFTS + 1


@pytest.mark.parametrize("cost", [-0.1, float("nan"), float("inf")])
def test_a_cost_is_a_number_of_at_least_0(cost: float) -> None:
    with pytest.raises(ConfigError, match="cost: expected a number of at least 0"):
        LinearCost(cost)


def test_a_stair_is_where_it_was_measured() -> None:
    times = FollowedCost(STAIR, 40).times(1, 1, 10).array(19)
    assert times[:4].tolist() == [1.0] * 4
    assert times[4:8].tolist() == [2.0] * 4
    # In between, and beyond the last one as since half of its rows.
    assert times[11] == pytest.approx(3.0)
    assert times[19] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # Rows 16 to 32 took 1.5 ms each; the stair at the end says nothing of others.
        ([(1, 1, 64, 8.0), (16, 1, 64, 26.0), (30, 1, 64, 45.0), (32, 1, 64, 50.0)], 50.0 + 104 * 1.5),
        # 136 rows can be run 8 at a time.
        ([(1, 1, 64, 1.0), (4, 1, 64, 1.0), (8, 1, 64, 12.0)], 17 * 12.0),
        # A prompt's rows choose one token, so those of drafts take as much at least, and are not taken for as few.
        ([(1, 1, 64, 8.0), (16, 1, 64, 28.0), (32, 1, 64, 56.0), (64, 0, 0, 80.0)], 56.0 + 104 * 1.75),
        ([(1, 1, 64, 8.0), (2, 1, 64, 8.0), (4, 1, 64, 8.0), (64, 0, 0, 68.0)], 68.0 + 72.0),
        ([(1, 1, 64, 8.0), (64, 0, 0, 68.0)], 68.0 + 72 * 60 / 63),
    ],
)
def test_more_rows_than_were_measured(steps: list[tuple[int, int, int, float]], expected: float) -> None:
    assert FollowedCost(profile(*steps), 200).times(1, 1, 64).array(135)[135] == pytest.approx(expected)


def test_drafts_with_other_rows_cost_what_they_cost_there() -> None:
    model = FollowedCost(STAIR, 40)
    assert model.times(4, 1, 10).array(2).tolist() == [1.0, 2.0, 2.0]
    assert np.diff(model.times(16, 1, 10).array(4)) == pytest.approx([0.25] * 4)
    assert len(model.times(39, 1, 10).array(8)) == 2, "a step has no more rows than it may have"


def test_less_for_more_rows_is_noise() -> None:
    model = FollowedCost(profile((1, 1, 0, 1.0), (2, 1, 0, 1.5), (3, 1, 0, 1.2), (4, 1, 0, 2.0)), 8)
    assert model.times(1, 1, 0).array(3).tolist() == [1.0, 1.5, 1.5, 2.0]


def test_context_and_requests_are_measured_apart() -> None:
    measured = profile(
        (1, 1, 10, 1.0), (2, 1, 10, 1.2), (4, 1, 10, 2.0), (1, 1, 110, 1.5), (4, 4, 10, 3.0), (20, 4, 10, 9.0)
    )  # fmt: skip
    model = FollowedCost(measured, 32)
    assert model.times(1, 1, 110).array(0)[0] == pytest.approx(1.5)
    assert model.times(2, 1, 60).array(0)[0] == pytest.approx(1.2 + 0.25)
    assert model.times(4, 4, 40).array(0)[0] == pytest.approx(3.0)
    # Two requests: halfway between 1 and 4 on the scale of factors of 2, and twice the context of one.
    assert model.times(2, 2, 20).array(0)[0] == pytest.approx(1.2 * 1.25)


def test_drafts_of_several_requests_cost_what_was_measured_of_them() -> None:
    alone = [(1, 1, 10, 1.0), (2, 1, 10, 1.1), (8, 1, 10, 1.7), (16, 1, 10, 2.5), (64, 1, 10, 7.3)]
    batches = [(8, 8, 10, 3.4), (16, 8, 10, 3.75), (64, 8, 10, 7.3)]
    model = FollowedCost(profile(*alone, *batches), 80)
    times = model.times(8, 8, 80).array(56)
    assert times[[0, 8, 56]].tolist() == pytest.approx([3.4, 3.75, 7.3])
    assert model.times(8, 1, 10).array(8)[8] == pytest.approx(2.5), "one request's are its own"
    # Sixteen requests were not measured: as eight.
    assert model.times(16, 16, 160).array(0)[0] == pytest.approx(3.75)


def test_what_drafts_read_of_long_contexts_is_measured_by_how_many_requests_there_are() -> None:
    alone = [(1, 1, 10, 1.0), (5, 1, 10, 1.4), (1, 1, 110, 1.5), (5, 1, 110, 1.9)]
    batches = [(8, 8, 10, 2.0), (40, 8, 10, 5.2), (8, 8, 110, 2.8), (40, 8, 110, 8.4)]
    model = FollowedCost(profile(*alone, *batches, (64, 1, 10, 7.3)), 80)
    # One request's drafts read nothing again; each of eight requests' does three quarters of what its own token does.
    assert model.times(1, 1, 110).per_draft == pytest.approx(0.0)
    assert model.times(8, 8, 880).per_draft == pytest.approx(0.075)
    assert model.times(8, 8, 880).array(32)[32] == pytest.approx(8.4)
    assert model.times(8, 8, 80).per_draft == 0
    halfway = model.times(1, 1, 10 + 4 * 100).fixed
    assert halfway == pytest.approx(4 * 0.5), "four times the context"


def test_a_machine_that_is_slower_as_a_whole_changes_no_ratio() -> None:
    model = FollowedCost(STAIR, 40)
    before = model.times(1, 1, 10).array(19).copy()
    for step in range(640):
        rows = (1, 2, 4, 8, 16)[step % 5]
        model.observe(rows, 1, 10, 1.7 * before[rows - 1])
    assert model.speed == pytest.approx(1.7, rel=0.05)
    after = model.times(1, 1, 10).array(15)  # times of more rows are optimistic, as none had them
    assert after / after[0] == pytest.approx(before[:16] / before[0], rel=0.05)
    known = np.array([model.expected(rows, 1, 10) for rows in range(1, 21)])
    assert known / known[0] == pytest.approx(before / before[0], rel=0.05)
    assert model.times(1, 1, 10).array(0)[0] * model.speed == pytest.approx(1.7, rel=0.05)


def test_rows_that_cost_more_than_measured_are_found_out() -> None:
    model = FollowedCost(STAIR, 40)
    for _ in range(320):
        model.observe(1, 1, 10, 1.0)
        model.observe(8, 1, 10, 3.0)
    times = model.times(1, 1, 10).array(7)
    assert times[7] / times[0] == pytest.approx(3.0, rel=0.1)
    assert (np.diff(times) >= 0).all()


def test_one_interrupted_step_says_little() -> None:
    model = FollowedCost(STAIR, 40)
    for _ in range(63):
        model.observe(1, 1, 10, 1.0)
    model.observe(1, 1, 10, 1000.0)
    assert model.speed < 1.1
    assert model.times(1, 1, 10).array(0)[0] < 1.05


def test_a_single_measured_time_is_a_flat_line() -> None:
    assert FollowedCost(profile((1, 1, 10, 1.0)), 4).times(1, 1, 10).array(3).tolist() == [1.0] * 4


@pytest.mark.parametrize("read", [0.0, 0.4])
def test_what_drafts_read_of_the_context_is_learned(read: float) -> None:
    # A context of 1,010 tokens takes 1 ms to read, and a draft reads a part of it again.
    model = FollowedCost(profile((1, 1, 10, 1.0), (8, 1, 10, 1.7), (16, 1, 10, 2.5), (1, 1, 1010, 2.0)), 40)
    before = model.times(1, 1, 1010).array(7)
    for step in range(400):
        num_drafts = (step * 5) % 8
        # The machine is slower than when it was measured, as a whole.
        model.observe(1 + num_drafts, 1, 1010, 1.5 * (before.item(num_drafts) + read * num_drafts))
    after = model.times(1, 1, 1010).array(7)
    expected = before + read * np.arange(8)
    assert after / after[0] == pytest.approx(expected / expected[0], rel=0.06)


def test_a_few_noisy_steps_say_little_of_what_drafts_read() -> None:
    model, source = FollowedCost(profile((1, 1, 10, 1.0), (16, 1, 10, 2.5), (1, 1, 1010, 2.0)), 40), random.Random(3)
    plain = model.times(1, 1, 1010).array(7)
    for _ in range(30):
        num_drafts = source.randrange(8)
        model.observe(1 + num_drafts, 1, 1010, plain.item(num_drafts) * source.choice([0.85, 1.0, 1.0, 1.0, 4.0]))
        assert model.times(1, 1, 1010).per_draft < 0.1, "a tenth of what the request's own token reads"


@pytest.mark.parametrize(("measured_ms", "true_ms", "best"), [(140.0, 121.0, (7, 8)), (121.0, 160.0, (0,))])
def test_steps_that_never_ran_are_tried_and_found_out(
    measured_ms: float, true_ms: float, best: tuple[int, ...]
) -> None:
    """Sixteen requests, each with eight drafts that are right, of which so many are verified as seem worth it.

    Their step of 64 rows was measured once, while something else ran. In one case drafts seem to be worth nothing, and
    are; in the other they seem to be, and are not. Some steps are plain, as the guard has it.
    """
    alone = [(1, 1, 64, 8.0), (16, 1, 64, 28.0), (32, 1, 64, 56.0), (16, 16, 64, 35.0)]
    truth = FollowedCost(profile(*alone, (64, 16, 64, true_ms)), 200).times(16, 16, 1024).array(128)
    model = FollowedCost(profile(*alone, (64, 16, 64, measured_ms)), 200)
    drafted = []
    for step in range(300):
        rates = (1 + np.arange(9)) / model.times(16, 16, 1024).array(128)[::16]
        most = int(rates.argmax())
        drafted.append(most if rates[most] > 1.03 * rates[0] and step % 48 else 0)
        num_rows = 16 * (1 + drafted[-1])
        model.observe(num_rows, 16, 1024, truth.item(num_rows - 16))
    assert [n for i, n in enumerate(drafted) if i % 48 and n not in best and i >= 100] == []


def test_optimism_says_nothing_of_what_drafts_read() -> None:
    """Where all steps take what was measured nothing is learned, however seldom a kind of them is."""
    alone = [(1, 1, 10, 1.0), (8, 1, 10, 1.7), (16, 1, 10, 2.5), (1, 1, 1010, 2.0), (8, 1, 1010, 3.05)]
    batches = [(8, 8, 10, 2.0), (64, 8, 10, 5.2), (8, 8, 1010, 6.0), (64, 8, 1010, 13.2)]
    model, source = FollowedCost(profile(*alone, *batches), 80), random.Random(5)
    truth = {n: model.times(n, n, 1010 * n) for n in (1, 8)}
    times = {n: found.array(64).tolist() for n, found in truth.items()}
    for _ in range(400):
        num_requests = source.choice((1, 8))
        num_drafts = num_requests * source.choice((0, 0, 0, 0, 1, 3, 7))
        model.observe(num_requests + num_drafts, num_requests, 1010 * num_requests, times[num_requests][num_drafts])
        found = model.times(num_requests, num_requests, 1010 * num_requests)
        assert found.per_draft == pytest.approx(truth[num_requests].per_draft, abs=1e-9)
        expected = model.expected(num_requests + num_drafts, num_requests, 1010 * num_requests)
        assert expected == pytest.approx(times[num_requests][num_drafts])
    assert model.speed == pytest.approx(1.0)


def test_times_outlive_their_model() -> None:
    times = FollowedCost(STAIR, 40).times(1, 1, 10)
    gc.collect()
    assert times.array(4).tolist() == [1.0, 1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("steps", "max_num_rows", "refused"),
    [
        ([(1, 1, 10, 1.0)], 0, "max_num_rows: expected at least 1"),
        ([(2, 1, 10, 1.0)], 4, "steps: expected one of one row of one request"),
        ([(1, 1, 10, 1.0), (0, 1, 10, 1.0)], 4, "steps: expected rows >= 1"),
        ([(1, 1, 10, 0.0)], 4, "curve: expected finite rising numbers > 0"),
        ([(1, 1, 10, 1.0), (2, 2, 10, float("inf"))], 4, "shapes: expected finite numbers > 0"),
        ([(1, 1, -1, 1.0)], 4, "contexts: expected >= 0"),
        ([(1, 1, 10, 1.0), (1, 1, 20, float("inf"))], 4, "slopes: expected finite numbers >= 0"),
    ],
)
def test_times_that_cannot_be_are_refused(
    steps: list[tuple[int, int, int, float]], max_num_rows: int, refused: str
) -> None:
    with pytest.raises(ValueError, match=refused):
        FollowedCost(profile(*steps), max_num_rows)


def test_a_step_takes_some_time() -> None:
    model = FollowedCost(STAIR, 40)
    with pytest.raises(ValueError, match="ms: expected a finite number"):
        model.observe(1, 1, 10, float("nan"))
    assert model.speed == 1.0
