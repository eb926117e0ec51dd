"""The detector demands more of drafts that lose, in the end more than any can give, and tries again ever later."""

from __future__ import annotations

import math
import random

import pytest

from fastdeploy_sd.spec_decode.control.controller import LEAST_DEMAND
from tests.doubles.controller_parts import RegressionDetector

PLAIN_S = 1e-3


def run(  # noqa: PLR0917 (what steps are)
    detector: RegressionDetector,
    num_steps: int,
    tokens_per_step: float,
    step_s: float,
    num_requests: int = 1,
    expected: float = 9.0,
    plain_s: float = PLAIN_S,
) -> int:
    """Run steps as the guard allows, all of which are expected to gain so much; returns how many had drafts.

    Times vary, and some steps are interrupted.
    """
    source, num_drafted = random.Random(3), 0
    for _ in range(num_steps):
        noise = source.uniform(0.9, 1.1) * (50.0 if source.random() < 0.02 else 1.0)
        if expected >= detector.least_gain(num_requests):
            num_tokens = num_requests * (int(tokens_per_step) + (source.random() < tokens_per_step % 1))
            detector.observe(num_requests, num_tokens, 3, step_s * noise, slowdown_ratio=step_s / plain_s)
            num_drafted += 1
        else:
            detector.observe(num_requests, num_requests, 0, plain_s * noise)
    return num_drafted


@pytest.mark.parametrize("num_requests", [1, 6])
def test_what_pays_stays_on_and_little_is_spent_on_comparing(num_requests: int) -> None:
    detector = RegressionDetector()
    drafted = run(detector, 4000, 2.0, 1.3e-3, num_requests, expected=1.5)
    assert drafted > 0.97 * 4000
    assert not detector.is_off(num_requests)
    # Plain steps of several requests take as long, and bring a token to each.
    assert detector.gain == pytest.approx(2.0 / 1.3, rel=0.15)


@pytest.mark.parametrize("num_requests", [1, 6])
def test_a_machine_that_becomes_slower_stops_no_drafts_that_pay(num_requests: int) -> None:
    detector, num_drafted = RegressionDetector(), 0
    for slow in (1.0, 1.7, 1.0, 1.7):  # compared with plain steps of a fast spell, drafts of a slow one lose
        num_drafted += run(detector, 1000, 2.0, 1.4e-3 * slow, num_requests, 1.3, plain_s=PLAIN_S * slow)
    assert num_drafted > 0.97 * 4000
    assert not detector.is_off(num_requests)
    # And what loses on the slow machine is found out all the same, within a hundred steps.
    run(detector, 100, 1.2, 2.7e-3, num_requests, 1.3, plain_s=1.7 * PLAIN_S)
    assert run(detector, 100, 1.2, 2.7e-3, num_requests, 1.3, plain_s=1.7 * PLAIN_S) == 0


def test_what_is_not_worth_what_is_expected_of_it_loses_little() -> None:
    # A fifth is lost in every step of which a tenth is expected: two plain steps' time are lost twice.
    detector = RegressionDetector()
    assert run(detector, 250, 1.1, 1.4e-3, expected=1.1) < 40
    # And no less is asked of what may really bring more, as long as that has not failed as well.
    assert not detector.is_off(1)
    assert detector.least_gain(1) < 1.3


def test_what_never_pays_is_off_and_longer_each_time() -> None:
    detector = RegressionDetector()
    first = run(detector, 1000, 1.1, 1.4e-3)
    assert detector.is_off(1)
    assert detector.gain == pytest.approx(1.1 / 1.4, rel=0.15)
    second = run(detector, 12000, 1.1, 1.4e-3)
    assert second / 12000 < first / 1000 < 0.2
    assert second / 12000 < 0.05


def test_a_long_step_that_was_to_be_expected_is_no_interruption() -> None:
    # Eight plain steps' time for six tokens: it does not pay, however often a step of two plain ones is interrupted.
    detector = RegressionDetector()
    for _ in range(400):
        if math.isfinite(detector.least_gain(1)):
            detector.observe(1, 6, 32, 8 * PLAIN_S, slowdown_ratio=8.0)
        else:
            detector.observe(1, 1, 0, PLAIN_S)
    assert detector.is_off(1)


def test_what_loses_is_found_out_also_where_requests_come_or_go_in_most_steps() -> None:
    """One step of sixteen can be compared."""
    detector, source, num_drafted = RegressionDetector(), random.Random(5), 0
    for step in range(8000):
        has_drafts, is_comparable = math.isfinite(detector.least_gain(6)), source.random() < 1 / 16
        num_tokens = 6 if is_comparable else 0
        detector.observe(6, num_tokens, 3 * has_drafts, (1.4 if has_drafts else 1.0) * PLAIN_S, slowdown_ratio=1.4)
        num_drafted += has_drafts and step >= 4000
    assert num_drafted < 400


def test_what_pays_again_is_found_out() -> None:
    detector = RegressionDetector()
    run(detector, 600, 1.0, 1.4e-3)
    assert detector.is_off(1)
    assert run(detector, 20000, 3.0, 1.4e-3) > 10000
    assert detector.least_gain(1) in (LEAST_DEMAND, math.inf)


def test_asking_counts_once_drafts_lose() -> None:
    # Drafts that bring just what they take, and steps in which asking was for nothing.
    guards = RegressionDetector(), RegressionDetector()
    for detector, asking_s in zip(guards, (0.0, 0.2 * PLAIN_S), strict=True):
        for step in range(200):
            has_drafts = step % 5 == 4
            seconds = (1.5 if has_drafts else 1.0) * PLAIN_S
            detector.observe(1, 1 + (step % 10 == 9) if has_drafts else 1, int(has_drafts), seconds, asking_s=asking_s)
    free, model_source = (detector.least_gain(1) for detector in guards)
    assert free == LEAST_DEMAND
    assert model_source > LEAST_DEMAND


def test_asking_alone_demands_nothing() -> None:
    detector = RegressionDetector()
    for _ in range(1000):
        detector.observe(1, 1, 0, PLAIN_S, asking_s=0.2 * PLAIN_S)
    assert detector.least_gain(1) == LEAST_DEMAND


def test_classes_of_load_are_apart() -> None:
    detector = RegressionDetector()
    run(detector, 400, 1.0, 1.5e-3, num_requests=8)
    run(detector, 400, 3.0, 1.2e-3, num_requests=1)
    assert detector.is_off(8)
    assert not detector.is_off(1)
    assert detector.least_gain(100) == LEAST_DEMAND


def test_steps_that_cannot_be_compared_are_not() -> None:
    detector = RegressionDetector()
    for _ in range(1000):
        detector.observe(1, 0, 3, 5e-3)
    assert detector.gain == 0
    assert not detector.is_off(1)
    detector.observe(1, 0, 0, 5e-3)
    assert detector.least_gain(1) == LEAST_DEMAND


def test_drafts_of_others_put_a_plain_step_off_and_nobody_waits_for_it() -> None:
    # A request with a method of its own drafts in every step, so that none is plain and none can be compared.
    detector, num_allowed = RegressionDetector(), 0
    for _ in range(1000):
        num_allowed += math.isfinite(detector.least_gain(2))
        detector.observe(2, 0, 3, 2e-3)
    assert num_allowed > 900
    # And it is not given up for good: the first chance is taken.
    while math.isfinite(detector.least_gain(2)):
        detector.observe(2, 0, 3, 2e-3)
    detector.observe(2, 2, 0, PLAIN_S)
    assert math.isfinite(detector.least_gain(2))


def test_a_plain_step_that_tells_no_time_is_followed_by_another() -> None:
    detector = RegressionDetector()
    detector.observe(1, 0, 0, PLAIN_S)  # a request came
    num_until = 0
    while math.isfinite(detector.least_gain(1)):
        detector.observe(1, 3, 3, 2 * PLAIN_S)
        num_until += 1
    assert num_until == 48


def test_asking_that_brings_less_than_it_takes_is_not_worth_it_until_drafts_are_right() -> None:
    detector = RegressionDetector()
    assert detector.is_worth_asking(1)
    for _ in range(60):
        detector.observe(1, 1, 0, PLAIN_S, asking_s=0.2 * PLAIN_S)
    assert not detector.is_worth_asking(1)
    assert detector.is_worth_asking(8)
    detector.observe(1, 1, 0, PLAIN_S, asking_s=50 * PLAIN_S)  # interrupted
    # Drafts that just bring what they take do not pay for the asking; a single step of many right ones does.
    for _ in range(60):
        detector.observe(1, 2, 3, 2 * PLAIN_S, asking_s=0.2 * PLAIN_S, slowdown_ratio=2.0)
    assert not detector.is_worth_asking(1)
    detector.observe(1, 9, 8, 1.5 * PLAIN_S, asking_s=0.2 * PLAIN_S, slowdown_ratio=1.5)
    assert detector.is_worth_asking(1)


def test_nothing_lost_yet_demands_the_least() -> None:
    assert RegressionDetector().least_gain(1) == LEAST_DEMAND
