from __future__ import annotations

import random

import pytest

from fastdeploy_sd.engine.stopping import Stop, StopRule, find_stop
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import FinishReason
from tests.doubles.engines import EOS, toy_request

STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH


def rule(*, eos: set[int] | None = None, stop: set[int] | None = None, low: int = 0, high: int = 100) -> StopRule:
    return StopRule(frozenset(eos or ()), frozenset(stop or ()), low, high)


@pytest.mark.parametrize(
    ("new", "before", "stop_rule", "expected"),
    [
        ([5], 0, rule(), None),
        ([5, 6, 1, 7], 3, rule(eos={1}), Stop(3, STOP)),
        ([5, 9, 1], 0, rule(eos={1}, stop={9}), Stop(2, STOP, 9)),
        ([1, 9], 0, rule(eos={1}, stop={9}), Stop(1, STOP)),
        ([5, 6, 7], 2, rule(high=4), Stop(2, LENGTH)),
        ([5, 1], 2, rule(eos={1}, high=4), Stop(2, STOP)),
        ([5, 9], 2, rule(stop={9}, high=4), Stop(2, STOP, 9)),
        ([1, 5, 1], 0, rule(eos={1}, low=3), Stop(3, STOP)),
        ([9, 5], 0, rule(stop={9}, low=3), None),
        ([1], 4, rule(eos={1}, low=5), Stop(1, STOP)),
        ([1], 3, rule(eos={1}, low=5), None),
    ],
)
def test_the_first_token_that_ends_the_request_counts(
    new: list[int], before: int, stop_rule: StopRule, expected: Stop | None
) -> None:
    assert find_stop(new, before, stop_rule) == expected


def test_the_end_does_not_depend_on_how_tokens_are_grouped() -> None:
    rng = random.Random(0)
    for _ in range(500):
        stream = [rng.randrange(12) for _ in range(30)]
        stop_rule = rule(eos={0}, stop={1}, low=rng.randint(0, 10), high=rng.randint(1, 30))
        whole = find_stop(stream, 0, stop_rule)
        assert whole is not None
        done, stop = 0, None
        while stop is None:
            group = stream[done : done + rng.randint(1, 5)]
            stop = find_stop(group, done, stop_rule)
            done += len(group) if stop is None else stop.num_tokens
        assert (done, stop.reason, stop.stop_reason) == (whole.num_tokens, whole.reason, whole.stop_reason)


def test_the_rule_of_a_request() -> None:
    sampling = SamplingParams(stop_token_ids=(EOS, 5), min_tokens=2)
    assert StopRule.of(toy_request("a", [3], 9, sampling=sampling)) == rule(eos={EOS}, stop={5}, low=2, high=9)


def test_ignoring_eos_still_obeys_the_same_id_as_a_stop_token() -> None:
    sampling = SamplingParams(stop_token_ids=(EOS,), ignore_eos=True)
    stop_rule = StopRule.of(toy_request("a", [3], 9, sampling=sampling))
    assert find_stop([EOS], 0, stop_rule) == Stop(1, STOP, EOS)
    ignoring = StopRule.of(toy_request("a", [3], 9, sampling=SamplingParams(ignore_eos=True)))
    assert find_stop([EOS], 0, ignoring) is None
