"""The bound on the time of a step with prompts, on a made-up clock."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.engine.prompt_budget import StepTime
from fastdeploy_sd.types import DraftTokens, SchedulerOutput, StepResult, VerifyResult
from tests.doubles.bench import Bench
from tests.doubles.engines import toy_request

_MANY = 1 << 20


def observe(time: StepTime, rows: list[int], ms: float) -> None:
    """A step with so many tokens in its rows took `ms`."""
    names = tuple(f"r{row}" for row in range(len(rows)))
    zeros = np.zeros(len(rows), np.int32)
    draft = DraftTokens.none(len(rows))
    plan = SchedulerOutput(1, names, (), (), zeros, np.array(rows, np.int32), draft, zeros)
    verified = VerifyResult(zeros, np.zeros(len(rows) + 1, np.int32), zeros)
    time.observe(plan, StepResult(1, names, verified, draft, timings_ms={"forward": ms, "idle": 1e6}))


def machine_ms(num_prompt_tokens: int, num_decoding: int, per_token: float = 1.0, plain: float = 20.0) -> float:
    return (plain if num_decoding else 5.0) + per_token * num_prompt_tokens


def run(time: StepTime, num_steps: int, per_token: float = 1.0, plain: float = 20.0) -> list[float]:
    """Steps of one decoding request and as long a chunk as is allowed; returns their times."""
    found = []
    for _ in range(num_steps):
        chunk = time.max_prompt_tokens(_MANY, 1)
        found.append(machine_ms(chunk, 1, per_token, plain))
        observe(time, [1, chunk], found[-1])
    return found


def test_chunks_come_to_fill_the_time_and_not_more() -> None:
    time = StepTime(150.0)
    observe(time, [1], 20.0)
    steps = run(time, 12)
    assert max(steps) <= 150
    assert min(steps[-4:]) > 100


def test_a_full_width_prompt_that_ran_alone_tells_what_tokens_cost() -> None:
    time = StepTime(150.0)
    observe(time, [2048], machine_ms(2048, 0))
    observe(time, [1], 20.0)
    assert max(run(time, 5)) <= 150


def test_a_slow_model_may_take_three_plain_steps() -> None:
    time = StepTime(150.0)
    observe(time, [1], 400.0)
    steps = run(time, 12, per_token=10.0, plain=400.0)
    assert 800 < steps[-1] <= 1200


def test_dearer_tokens_of_longer_contexts_shorten_the_chunks() -> None:
    time = StepTime(150.0)
    observe(time, [1], 20.0)
    run(time, 10)
    steps = [run(time, 1, per_token=1 + 0.02 * i)[0] for i in range(200)]
    assert max(steps) <= 150


def test_one_disturbed_step_is_soon_forgotten() -> None:
    time = StepTime(150.0)
    observe(time, [1], 20.0)
    run(time, 10)
    usual = time.max_prompt_tokens(_MANY, 1)
    observe(time, [1, usual], 5000.0)
    assert time.max_prompt_tokens(_MANY, 1) >= usual // 2
    run(time, 8)
    assert time.max_prompt_tokens(_MANY, 1) >= 0.9 * usual


def test_many_requests_at_once_after_steps_of_one_have_chunks_that_fill_the_time() -> None:
    """Steps of many decoding tokens take long: they must not be taken for steps with costly prompts."""

    def step_ms(num_tokens: int) -> float:
        return 15.0 + 5.0 * num_tokens

    time = StepTime(150.0)
    for _ in range(20):
        observe(time, [1], step_ms(1))
    for _ in range(12):
        chunk = time.max_prompt_tokens(_MANY, 16)
        observe(time, [1] * 16 + [chunk], step_ms(16 + chunk))
    assert 0.6 * 3 * step_ms(16) < step_ms(16 + chunk) <= 3 * step_ms(16)


def test_a_few_tokens_say_little() -> None:
    time = StepTime(150.0)
    observe(time, [1], 20.0)
    run(time, 10)
    usual = time.max_prompt_tokens(_MANY, 1)
    observe(time, [1, 2], 24.0)
    assert time.max_prompt_tokens(_MANY, 1) >= 0.9 * usual


def test_zero_is_no_bound() -> None:
    time = StepTime(0.0)
    run(time, 3)
    assert time.max_prompt_tokens(_MANY, 1) == _MANY


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_long_prompt_is_cut_only_while_others_decode(policy: str) -> None:
    bench = Bench(max_num_batched_tokens=2048, max_step_ms=150.0, policy=policy, info={"num_blocks": 4096})
    bench.executor.step_ms = lambda plan: 20.0 + int(plan.num_new_tokens.sum())
    bench.submit(toy_request("a", [2] * 3000, 2))
    assert bench.step() == {"a": 2048}, "alone it has the full width"
    assert bench.step() == {"a": 952}
    bench.submit(toy_request("stream", [3] * 8, 40))
    bench.step()
    bench.step()
    bench.submit(toy_request("b", [4] * 1000, 2))
    chunks = []
    while (step := bench.step())["b"] > 1:
        chunks.append(step["b"])
        assert step["stream"] == 1
    assert sum(chunks) == 1000
    assert 80 < max(chunks) <= 130
    assert len(chunks) < 16


def test_a_prompt_that_came_before_does_not_keep_a_decoding_request_out_of_a_step() -> None:
    bench = Bench(max_num_batched_tokens=8, policy="fair")
    bench.submit(toy_request("long", range(2, 42)))
    assert bench.step() == {"long": 8}
    bench.submit(toy_request("short", [50, 51]))
    assert bench.step() == {"long": 6, "short": 2}
    assert bench.step() == {"long": 7, "short": 1}
