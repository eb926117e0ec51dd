"""Measuring what steps cost: it ends in time, leaves nothing behind, and gives times that a cost model can use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.engines import greedy_request
from fastdeploy_sd.config import CacheConfig, Config, ModelConfig, SchedulerConfig, SpeculativeConfig
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.spec_decode.control.profile import CostProfile
from fastdeploy_sd.types import SchedulerOutput, StepResult
from fastdeploy_sd.worker.autotune.cost_file import profile_of
from fastdeploy_sd.worker.autotune.cost_measurement import measure_costs
from fastdeploy_sd.worker.autotune.monotone_fit import monotone_fit
from fastdeploy_sd.worker.executor import LocalExecutor, create_executor
from tests.doubles.controller_parts import FollowedCost

pytestmark = pytest.mark.slow

CONFIG = Config(
    ModelConfig("demo", max_model_len=512),
    cache=CacheConfig(num_blocks=256),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
    speculative=SpeculativeConfig("mtp", num_speculative_tokens=4, num_model_steps=4),
)
# Enough for every kind of step on any machine; a quiet one takes a hundredth.
AMPLE_S = 60.0
# What several requests begin with is read once in whole parts of so many tokens.
PARTITION = 256


def generate(executor: LocalExecutor, config: Config) -> list[list[int]]:
    """What a few requests get that share a prefix."""
    engine = Engine(config, executor)
    for i, length in enumerate((7, 40, 41)):
        engine.submit(greedy_request(f"r{i}", np.arange(5, 5 + length, dtype=np.int32), 24))
    found: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    return [found[name] for name in sorted(found)]


def test_it_leaves_no_trace_and_every_kind_of_step_has_a_time() -> None:
    executor, fresh = create_executor(CONFIG), create_executor(CONFIG)
    try:
        companies: list[list[tuple[int, ...]]] = []

        def execute(plan: SchedulerOutput) -> StepResult:
            num_tokens = max((new.num_prompt_tokens for new in plan.new), default=0)
            if num_tokens > PARTITION:
                companies.append([new.block_ids[: PARTITION // executor.model_info.block_size] for new in plan.new])
            return executor.execute(plan)

        costs = measure_costs(execute, executor.model_info, 8, 256, AMPLE_S)
        # Attention would read what they begin with alike once for all of them.
        assert max(map(len, companies)) == 8
        assert all(len(set(batches)) == len(batches) for batches in companies)
        assert generate(executor, CONFIG) == generate(fresh, CONFIG)
        shapes = [(s.requests, s.context, s.rows) for s in costs.steps]
        assert shapes == sorted(shapes)
        assert {(1, 64, 1), (1, 64, 2), (1, 64, 5), (2, 64, 2), (8, 64, 8), (8, 64, 32), (0, 0, 64)} <= set(shapes)
        longest = max(context for _, context, _ in shapes)
        assert {(1, longest, 1), (1, longest, 4), (8, longest, 8), (8, longest, 32), (8, 64, 40)} <= set(shapes)
        assert longest > 64
        assert {(d.method, d.requests, d.drafts) for d in costs.drafts} == {
            *(("mtp", n, k) for n in (1, 8) for k in (1, 3, 4)),
            *((method, n, 4) for method in ("ngram", "suffix") for n in (1, 8)),
        }
        profile = profile_of(CONFIG, executor.model_info, costs)
        assert profile.fits(profile.machine, profile.model)
        other = replace(CONFIG, scheduler=SchedulerConfig(max_num_seqs=7))
        assert not profile.fits(profile.machine, profile_of(other, executor.model_info, costs).model)
        assert isinstance(profile, CostProfile)
    finally:
        executor.shutdown()
        fresh.shutdown()


@pytest.mark.parametrize(("num_blocks", "most"), [(1, 0), (2, 1), (12, 4)])
def test_a_small_cache_holds_fewer_requests_or_none(num_blocks: int, most: int) -> None:
    config = replace(CONFIG, cache=CacheConfig(num_blocks=num_blocks))
    executor = create_executor(config)
    try:
        costs = measure_costs(executor.execute, executor.model_info, 8, 256, AMPLE_S)
        assert max((s.requests for s in costs.steps), default=0) == most
    finally:
        executor.shutdown()


def test_nothing_is_measured_where_drafts_are_longer_than_requests_may_be() -> None:
    model = replace(CONFIG.model, max_model_len=40)
    executor = create_executor(replace(CONFIG, model=model, speculative=SpeculativeConfig("suffix", 32)))
    try:
        costs = measure_costs(executor.execute, executor.model_info, 8, 256, AMPLE_S)
        assert (costs.steps, costs.drafts) == ((), ())
    finally:
        executor.shutdown()


def test_one_row_of_one_request_is_always_measured() -> None:
    limits = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=256)
    executor = create_executor(replace(CONFIG, scheduler=limits, speculative=SpeculativeConfig()))
    try:
        for budget_s in (AMPLE_S, 1e-9):
            costs = measure_costs(executor.execute, executor.model_info, 1, 256, budget_s)
            assert [(s.requests, s.rows) for s in costs.steps if s.requests and s.context == 64] == [(1, 1)]
            assert costs.drafts == ()
    finally:
        executor.shutdown()


class SlowSteps:
    """An executor's steps take what they are said to, by a clock of their own; the first one `cold_s` more."""

    def __init__(
        self,
        executor: LocalExecutor,
        least_s: float,
        row_s: float,
        monkeypatch: pytest.MonkeyPatch,
        cold_s: float = 0.0,
    ) -> None:
        self.executor, self.least_s, self.row_s, self.cold_s, self.now = executor, least_s, row_s, cold_s, 0.0
        monkeypatch.setattr("fastdeploy_sd.worker.autotune.cost_measurement.time.perf_counter", lambda: self.now)

    def __call__(self, plan: SchedulerOutput) -> StepResult:
        result = self.executor.execute(plan)
        num_rows = int(plan.num_new_tokens.sum())
        step_s = self.cold_s + max(self.least_s, self.row_s * num_rows) if num_rows else 0.0
        self.now += step_s
        self.cold_s = 0.0
        return replace(result, timings_ms={"forward": 1e3 * step_s, "draft": 0.0})


def test_it_ends_when_its_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = create_executor(CONFIG)
    try:
        slow = SlowSteps(executor, 0.0, 0.01, monkeypatch)
        costs = measure_costs(slow, executor.model_info, 8, 256, 2.0)
        # A context of 64 tokens takes a third of it; every method drafts a few times whatever is left.
        assert slow.now < 2.2
        assert {d.method for d in costs.drafts} == {"ngram", "suffix", "mtp"}
        found = {s.rows: s.ms for s in costs.steps if s.requests == 1 and s.context == 64}
        assert found == pytest.approx({rows: 10.0 * rows for rows in range(1, 6)})
        assert max(s.rows for s in costs.steps if s.requests) <= 12
        assert costs.is_steady
    finally:
        executor.shutdown()


def test_a_model_of_long_steps_runs_no_more_of_them_than_drafts_costs_follow_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt in two parts and two steps; what a draft costs is known from the prompt, not taken for nothing."""
    executor = create_executor(replace(CONFIG, speculative=SpeculativeConfig("auto", num_speculative_tokens=4)))
    try:
        slow = SlowSteps(executor, 0.4, 0.02, monkeypatch)
        costs = measure_costs(slow, executor.model_info, 8, 256, 2.0)
        assert slow.now == pytest.approx(0.4 + 48 * 0.02 + 2 * 0.4)
        short = [s for s in costs.steps if s.context <= 64]
        assert [(s.rows, s.requests, s.ms) for s in short] == [(48, 0, pytest.approx(960.0)), (1, 1, 400.0)]
        assert costs.drafts == ()
        times = FollowedCost(profile_of(CONFIG, executor.model_info, costs), 256).times(1, 1, 64)
        assert times.array(4)[4] > 1.1 * times.array(0)[0]
    finally:
        executor.shutdown()


def test_steps_of_many_rows_are_measured_first_and_weights_never_read_say_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of 0.6 billion weights: a row 1.5 ms, a step 10 ms, the first one 200 ms more. Not all is measured."""
    executor = create_executor(replace(CONFIG, speculative=SpeculativeConfig("auto", num_speculative_tokens=32)))
    try:
        slow = SlowSteps(executor, 0.01, 0.0015, monkeypatch, cold_s=0.2)
        costs = measure_costs(slow, executor.model_info, 8, 256, 0.9)
        assert slow.now < 1.0
        found = {(s.requests, s.context, s.rows): s.ms for s in costs.steps if s.context <= 64}
        assert found == pytest.approx({(n, c, rows): max(10.0, 1.5 * rows) for n, c, rows in found})
        assert {(1, 64, 32), (8, 64, 8), (8, 64, 32), (4, 64, 16), (0, 0, 48)} <= set(found)
        assert not {(1, 64, 17), (8, 64, 40), (0, 0, 64)} & set(found), "there was no time for them"
    finally:
        executor.shutdown()


def test_a_context_that_there_is_no_time_for_is_read_as_fast_as_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several requests, too: they do not seem to run on a slower machine, where drafts would take longer."""
    executor = create_executor(replace(CONFIG, speculative=SpeculativeConfig("auto", num_speculative_tokens=4)))
    try:
        info = replace(executor.model_info, weight_bytes=1_000_000, kv_token_bytes=500)
        costs = measure_costs(SlowSteps(executor, 0.4, 0.02, monkeypatch), info, 8, 256, 2.0)
        [long] = [s for s in costs.steps if s.context > 64]
        assert (long.requests, long.rows) == (1, 1)
        model = FollowedCost(profile_of(CONFIG, info, costs), 256)
        for num_requests in (1, 4):
            more = model.expected(num_requests, num_requests, 1000 + 64 * num_requests)
            assert more - model.expected(num_requests, num_requests, 64 * num_requests) == pytest.approx(400.0 * 0.5)
        unknown = measure_costs(SlowSteps(executor, 0.4, 0.02, monkeypatch), replace(info, weight_bytes=0), 8, 256, 2.0)
        assert all(s.context <= 64 for s in unknown.steps)
        ample = measure_costs(SlowSteps(executor, 0.01, 0.0005, monkeypatch), info, 8, 256, AMPLE_S)
        assert {s.ms for s in ample.steps if (s.requests, s.rows) == (1, 1)} == {10.0}, "what was measured counts"
    finally:
        executor.shutdown()


def test_the_one_row_step_is_as_lucky_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured more often. Once it is twice as fast, as steps are now and then where memory's speed changes."""
    executor = create_executor(replace(CONFIG, speculative=SpeculativeConfig("auto", num_speculative_tokens=32)))
    try:
        slow, num_base = SlowSteps(executor, 0.02, 0.0015, monkeypatch), 0

        def execute(plan: SchedulerOutput) -> StepResult:
            nonlocal num_base
            is_base = plan.num_new_tokens.tolist() == [1]
            num_base += is_base
            slow.least_s = 0.012 if is_base and num_base == 5 else 0.02
            return slow(plan)

        costs = measure_costs(execute, executor.model_info, 8, 256, 1.2)
        assert num_base > 5
        assert [s.ms for s in costs.steps if (s.requests, s.context, s.rows) == (1, 64, 1)] == [pytest.approx(20.0)]
    finally:
        executor.shutdown()


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_a_profile_of_which_much_cannot_be_is_not_kept(is_disturbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However steady: a neighbour was there while steps of few requests were measured, and gone behind them."""
    executor = create_executor(CONFIG)
    try:
        slow = SlowSteps(executor, 0.001, 0.0002, monkeypatch)

        def execute(plan: SchedulerOutput) -> StepResult:
            slow.least_s = 0.05 if is_disturbed and len(plan.request_ids) < 5 else 0.001
            return slow(plan)

        assert measure_costs(execute, executor.model_info, 8, 256, AMPLE_S).is_steady is not is_disturbed
    finally:
        executor.shutdown()


def test_times_that_cannot_be_are_not_kept() -> None:
    stairs = {(1, 1, 64): 1.0, (1, 2, 64): 1.1, (1, 4, 64): 1.1, (1, 5, 64): 1.6, (1, 8, 64): 1.6, (2, 1, 64): 1.1}
    assert monotone_fit(stairs) == stairs
    # A disturbed step takes no longer than its parts, ...
    assert monotone_fit(stairs | {(1, 8, 64): 30.0})[1, 8, 64] == 2.2
    assert monotone_fit(stairs | {(2, 4, 64): 30.0})[2, 4, 64] == 2.2
    # ... and no longer than a larger one.
    assert monotone_fit(stairs | {(1, 1, 64): 7.0})[1, 1, 64] == 1.1
    assert monotone_fit({(4, 1, 64): 5.2, (4, 4, 64): 5.2, (8, 1, 64): 1.6, (8, 4, 64): 6.5})[4, 1, 64] == 1.6
    # A prompt can be run in parts behind its beginning, ...
    prompt = {(0, 64, 0): 268.0, (1, 24, 64): 43.0, (1, 1, 64): 8.0}
    assert monotone_fit(prompt)[0, 64, 0] == 3 * 43.0
    # ... if there is as much before them.
    assert monotone_fit({(0, 256, 0): 900.0, (1, 24, 64): 43.0})[0, 256, 0] == 900.0
    # Other contexts, and parts of prompts, say nothing.
    assert monotone_fit({(1, 1, 64): 1.0, (1, 1, 512): 9.0, (0, 64, 0): 50.0})[1, 1, 512] == 9.0
    assert monotone_fit({(0, 1, 64): 1.0, (1, 2, 64): 9.0})[1, 2, 64] == 9.0
