"""The guard switches drafting off where it does not pay, and tries again later and later."""

from __future__ import annotations

import random

import pytest

from fastdeploy_sd.spec_decode.auto.guard import Guard

PLAIN_S = 1e-3


def run(guard: Guard, num_steps: int, tokens_per_step: float, step_s: float, num_requests: int = 1) -> int:
    """Run steps as the guard allows; returns how many had drafts. Times vary, and some steps are interrupted."""
    source, num_drafted = random.Random(3), 0
    for _ in range(num_steps):
        noise = source.uniform(0.9, 1.1) * (50.0 if source.random() < 0.02 else 1.0)
        if guard.allows_drafts(num_requests):
            num_tokens = num_requests * (int(tokens_per_step) + (source.random() < tokens_per_step % 1))
            guard.observe(num_requests, num_tokens, 3, step_s * noise)
            num_drafted += 1
        else:
            guard.observe(num_requests, num_requests, 0, PLAIN_S * noise)
    return num_drafted


@pytest.mark.parametrize("num_requests", [1, 6])
def test_what_pays_stays_on_and_little_is_spent_on_comparing(num_requests: int) -> None:
    guard = Guard()
    drafted = run(guard, 4000, 2.0, 1.3e-3, num_requests)
    assert drafted > 0.97 * 4000
    assert not guard.is_off(num_requests)
    # Plain steps of several requests take as long, and bring a token to each.
    assert guard.gain == pytest.approx(2.0 / 1.3, rel=0.15)


def test_what_does_not_pay_is_off_within_two_looks_and_longer_each_time() -> None:
    guard = Guard()
    assert run(guard, 250, 1.1, 1.4e-3) < 250
    assert guard.is_off(1)
    assert guard.gain == pytest.approx(1.1 / 1.4, rel=0.15)
    first = run(guard, 3000, 1.1, 1.4e-3)
    second = run(guard, 12000, 1.1, 1.4e-3)
    assert second / 12000 < first / 3000 < 0.5
    assert second / 12000 < 0.1


def test_a_long_step_that_was_to_be_expected_is_no_interruption() -> None:
    # Eight plain steps' time for six tokens: it does not pay, however often a step of four plain ones is interrupted.
    guard = Guard()
    for _ in range(400):
        if guard.allows_drafts(1):
            guard.observe(1, 6, 32, 8 * PLAIN_S, stretch=8.0)
        else:
            guard.observe(1, 1, 0, PLAIN_S)
    assert guard.gain == pytest.approx(6 / 8, rel=0.01)
    assert guard.is_off(1)


def test_what_pays_again_is_found_out() -> None:
    guard = Guard()
    run(guard, 600, 1.0, 1.4e-3)
    assert guard.is_off(1)
    assert run(guard, 3000, 3.0, 1.4e-3) > 2000


def test_classes_of_load_are_apart() -> None:
    guard = Guard()
    run(guard, 400, 1.0, 1.5e-3, num_requests=8)
    run(guard, 400, 3.0, 1.2e-3, num_requests=1)
    assert guard.is_off(8)
    assert not guard.is_off(1)
    assert guard.allows_drafts(100)


def test_steps_that_cannot_be_compared_are_not() -> None:
    guard = Guard()
    for _ in range(1000):
        guard.observe(1, 0, 3, 5e-3)
    assert guard.gain == 0
    assert not guard.is_off(1)
    guard.observe(1, 0, 0, 5e-3)
    assert guard.allows_drafts(1)
