"""What steps teach: what the next one is expected to take with all around it, and whether drafts pay."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.decision import DraftTimes, StepForecast
from fastdeploy_sd.spec_decode.control.offers import OfferTable
from fastdeploy_sd.spec_decode.control.profile import CostProfile, StepSample
from fastdeploy_sd.spec_decode.control.report import StepStats
from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import DraftSource

PLAIN_MS, ROW_MS = 1.0, 0.05
MAX_DRAFTS, MAX_REQUESTS = 4, 64


class Steps:
    """Steps of one request each, 8 tokens long: what they take is what was measured, unless something is said."""

    def __init__(self, *, is_measured: bool = True) -> None:
        self.controller = DraftController(MAX_REQUESTS, 4, [DraftSource.NGRAM])
        self.offers = OfferTable(1, MAX_REQUESTS, 4)
        self.step_stats, self.prediction = StepStats(), self.controller.prediction
        self.table = np.zeros((MAX_REQUESTS, 4096), np.int32)
        self.num_tokens = [8] * MAX_REQUESTS
        if is_measured:
            steps = [StepSample(rows, 1, 8, PLAIN_MS + ROW_MS * (rows - 1)) for rows in (1, 2, 8, 40)]
            self.controller.take_costs(CostProfile({}, {}, tuple(steps)), 64)

    def run(
        self,
        num_drafts: int,
        excess_ms: float = 0.0,
        slowness: float = 1.0,
        *,
        num_requests: int = 1,
        goes_on: bool = False,
        is_decode_only: bool = True,
    ) -> StepForecast:
        step_stats, num_rows = self.step_stats, num_requests - self.step_stats.num_forbidden
        step_stats.num_requests, step_stats.num_tokens = num_requests, num_requests + num_drafts
        step_stats.num_prompt_tokens = 0
        if not is_decode_only:
            step_stats.num_prompt_tokens, step_stats.num_tokens = 16, step_stats.num_tokens + 16
        step_stats.seconds = 1e-3 * slowness * (PLAIN_MS + ROW_MS * num_drafts + excess_ms)
        rows, nothing = np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, np.int32)
        num_tokens = np.array(self.num_tokens[:num_rows], np.int32)
        x = ProposeInput(tuple("r" * num_rows), rows, self.table, num_tokens, nothing)
        self.controller.bind(x, self.offers)
        return self.controller.observe_and_decide(step_stats, goes_on=goes_on)

    @property
    def times(self) -> DraftTimes:
        return self.controller.times

    def ms(self) -> list[float]:
        found: list[float] = self.times.array(MAX_DRAFTS).tolist()
        return found


def test_what_any_draft_costs_is_found_out_within_a_few_steps() -> None:
    steps = Steps()
    steps.run(0)
    assert steps.times.any_draft == 0
    for num_drafts in (1, 3, 1, 2, 5):
        for _ in range(3):
            steps.run(0)
        steps.run(num_drafts, 0.4)
    assert steps.times.any_draft == 0  # in the step after one with drafts
    steps.run(0)
    assert 0.15 < steps.times.any_draft < 0.45  # some of it is taken for what rows take
    ms = steps.ms()
    assert ms[4] / ms[0] == pytest.approx(PLAIN_MS + 4 * ROW_MS + 0.4, rel=0.1)


def test_steps_that_were_interrupted_say_nothing() -> None:
    steps, interrupted = Steps(), random.Random(0)
    for step in range(200):
        steps.run(2 if step % 4 == 3 else 0, 20.0 if interrupted.random() < 0.5 else 0.0)
        assert steps.times.any_draft < 0.15 * PLAIN_MS or step < 20


@pytest.mark.parametrize("num_plain", [1, 6])
def test_a_machine_that_became_slower_says_nothing_of_drafts(num_plain: int) -> None:
    """Plain steps are of the time before, and those with drafts of the time after."""
    steps = Steps()
    for slowness in (1.0, 1.7, 1.0, 3.0):
        for _ in range(20):
            steps.run(0, slowness=slowness)
        for _ in range(20):
            for _ in range(num_plain):
                steps.run(0, slowness=slowness)
            steps.run(4, slowness=slowness)
            steps.run(4, slowness=slowness)
            steps.run(0, slowness=slowness)
            ms = steps.ms()
            assert ms[4] / ms[0] == pytest.approx(1 + 4 * ROW_MS, rel=0.15)


def test_drafts_in_every_step_are_no_rare_kind() -> None:
    steps = Steps()
    for _ in range(20):
        steps.run(0)
    for _ in range(60):
        steps.run(4, slowness=1.7)
    steps.run(0, slowness=1.7)
    assert steps.times.any_draft < 0.1 * PLAIN_MS


def test_what_was_expensive_once_becomes_cheap_again() -> None:
    steps = Steps()
    for excess_ms, num_steps in ((0.4, 20), (0.0, 200)):
        for _ in range(num_steps):
            steps.run(2, excess_ms)
            steps.run(0)
    assert steps.times.any_draft < 0.1


def test_what_always_was_interrupted_is_tried_again() -> None:
    steps = Steps()
    for _ in range(8):
        steps.run(0)
        steps.run(2, 30.0)
    steps.run(0)
    assert 0 < steps.times.any_draft < 0.75 * PLAIN_MS
    for _ in range(40):
        steps.run(0)
    assert steps.times.any_draft == 0


def test_parts_of_prompts_that_are_foreseen_are_in_the_next_step() -> None:
    steps = Steps()
    steps.run(0)
    assert steps.times.num_rows == 1
    steps.step_stats.num_prompt_tokens_ahead = 10
    steps.run(0)
    assert steps.times.num_rows == 11
    assert PLAIN_MS + 5 * ROW_MS < steps.ms()[0] < PLAIN_MS + 11 * ROW_MS  # times of rows never run are optimistic


def test_where_nothing_was_measured_a_draft_takes_a_tenth_of_a_step_of_one_row() -> None:
    steps = Steps(is_measured=False)
    for num_requests in (1, 4):
        steps.run(0, num_requests=num_requests)
        at_first = 1.0 + 0.1 * (num_requests - 1)
        assert steps.ms() == pytest.approx([at_first + 0.1 * d for d in range(MAX_DRAFTS + 1)])


def around_ms(steps: Steps, num_requests: int, host_s: float = 0.0, *, num_drafts: int = 0) -> float:
    """What a step takes besides the model's part, on the machine of now; after one with this engine's part, if any."""
    steps.step_stats.host_seconds = host_s
    found = steps.run(num_drafts, num_requests=num_requests, goes_on=host_s > 0)
    return steps.times.fixed * found.speed


def test_one_long_time_of_the_engine_changes_nothing_and_many_do() -> None:
    steps = Steps()
    for i in range(20):
        found = around_ms(steps, 1, 0.05 if i == 13 else 0.001)
    assert found == pytest.approx(1.0)
    for _ in range(20):
        found = around_ms(steps, 1, 0.003)
    assert found == pytest.approx(3.0)


def test_loads_are_apart_and_one_that_was_not_seen_takes_the_latest() -> None:
    steps = Steps()
    assert around_ms(steps, 1, 0.001) == pytest.approx(1.0)
    assert around_ms(steps, 8, 0.004) == pytest.approx(4.0)
    assert around_ms(steps, 1) == pytest.approx(1.0)
    assert around_ms(steps, 15) == pytest.approx(4.0)
    assert around_ms(steps, 64) == pytest.approx(4.0)


def test_the_engines_part_after_drafts_is_a_cost_of_drafts_and_at_most_twice_the_other() -> None:
    steps = Steps()
    for _ in range(20):
        around_ms(steps, 1, 0.001)
        around_ms(steps, 1, 0.0015, num_drafts=2)
    assert steps.times.any_draft == pytest.approx(0.5, rel=0.1)
    for _ in range(20):
        around_ms(steps, 1, 0.009, num_drafts=2)
    assert steps.times.any_draft == pytest.approx(1.0, rel=0.1)


def test_choosing_drafts_is_in_every_step_in_which_they_are_chosen() -> None:
    steps = Steps()
    steps.prediction.choosing_s = 2e-4
    for _ in range(10):
        steps.run(2)
    assert steps.times.fixed == pytest.approx(0.2)


def test_what_was_predicted_is_compared_with_what_it_took() -> None:
    steps = Steps()
    found = steps.run(0)
    assert (found.predicted_s, found.measured_s) == (0, 0)
    for _ in range(40):
        ms = steps.ms()
        steps.prediction.time, steps.prediction.plain_time = ms[2], ms[0]
        found = steps.run(2, slowness=1.5)
    assert found.measured_s == pytest.approx(40e-3 * 1.5 * (PLAIN_MS + 2 * ROW_MS))
    assert found.predicted_s == pytest.approx(found.measured_s, rel=0.15)
    assert found.speed == pytest.approx(1.5, rel=0.05)


def gain(num_new: int, **how: bool) -> float:
    """Over plain decoding, as told of steps with 4 drafts that brought so many tokens."""
    steps = Steps()
    for step in range(60):
        num_drafts = 0 if step % 6 == 0 else 4
        steps.num_tokens[0] += num_new if num_drafts else 1
        found = steps.run(num_drafts, **how)
    return found.gain


def test_a_step_says_what_it_brought_only_where_that_is_known() -> None:
    assert gain(3, goes_on=True) == pytest.approx(3 / (1 + 4 * ROW_MS), rel=0.1)
    assert gain(3, goes_on=False) == 0  # other requests' tokens may be among them
    assert gain(3, goes_on=True, is_decode_only=False) == 0


def test_requests_that_forbid_drafts_bring_a_token_each() -> None:
    steps = Steps()
    steps.step_stats.num_forbidden = 1
    for step in range(60):
        num_drafts = 0 if step % 6 == 0 else 4
        steps.num_tokens[0] += 3 if num_drafts else 1
        found = steps.run(num_drafts, num_requests=2, goes_on=True)
    assert found.gain == pytest.approx(4 / 2 / (1 + 4 * ROW_MS), rel=0.1)


def test_what_is_certain_says_nothing_of_guesses() -> None:
    steps = Steps()
    steps.prediction.is_certain = True
    for step in range(60):
        steps.num_tokens[0] += 1
        found = steps.run(0 if step % 6 == 0 else 4, goes_on=True)
    assert found.gain == 0


def test_of_skipped_steps_only_the_last_is_known() -> None:
    """It brought a token, however many those before it did, and none predicted it."""
    steps = Steps()
    for step in range(60):
        is_plain = step % 6 == 0
        steps.prediction.time = steps.prediction.plain_time = float(is_plain)
        steps.num_tokens[0] += 9 if is_plain else 3
        steps.step_stats.num_skipped_steps = 8 if is_plain else 0
        found = steps.run(0 if is_plain else 4, goes_on=True)
        assert steps.step_stats.num_skipped_steps == 0
    assert found.measured_s == 0
    assert found.gain == pytest.approx(3 / (1 + 4 * ROW_MS), rel=0.1)


def test_nonsense_is_refused() -> None:
    steps = Steps()
    with pytest.raises(ValueError, match="num_rows: expected >= 0"):
        steps.run(-9)
    steps.step_stats.num_prompt_tokens_ahead = -1
    with pytest.raises(ValueError, match="num_prompt_tokens_ahead: expected >= 0"):
        steps.run(0)


def test_a_source_that_others_cover_is_skipped_where_asking_takes_long() -> None:
    controller = DraftController(1, 4, [DraftSource.MTP, DraftSource.NGRAM], covered=[DraftSource.NGRAM])
    step_stats = StepStats(num_tokens=1, num_requests=1)
    x = ProposeInput(("r",), np.zeros(1, np.int32), np.zeros((1, 8), np.int32), *np.ones((2, 1), np.int32))
    controller.bind(x, OfferTable(2, 1, 4))
    controller.prediction.asking_s = 1.0
    # With one of two look-ups asking takes half: it is asked again when it takes less than that.
    for lookup_s, skipped in ((4e-5, 0), (1e-4, 2), (4e-5, 2), (0.0, 2), (2e-5, 0), (4e-5, 0)):
        step_stats.seconds = 2e-3
        controller.prediction.lookup_s = lookup_s
        controller.observe_and_decide(step_stats, goes_on=False)
        assert controller.params.skipped_sources == skipped
