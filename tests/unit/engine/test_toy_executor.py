"""The toy executor is the judge of the engine's tests: each kind of wrong plan must be noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from fastdeploy_sd.engine.commit import commit_result
from fastdeploy_sd.engine.interfaces.kv_connector import NoKVConnector
from fastdeploy_sd.engine.scheduler import Scheduler
from fastdeploy_sd.types import DraftTokens, SchedulerOutput
from tests.doubles.bench import oracle
from tests.doubles.engines import toy_config, toy_info, toy_request
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel
from tests.values import i32


def after_two_steps() -> tuple[ToyExecutor, SchedulerOutput]:
    """An executor that has run a prompt of 6 and one output, and the right plan for its next step."""
    executor = ToyExecutor(toy_info())
    scheduler = Scheduler(toy_config(), executor.model_info, NoKVConnector())
    scheduler.add(toy_request("a", range(2, 8), 9))
    for _ in range(2):
        plan = scheduler.schedule()
        commit_result(scheduler.pool, plan, executor.execute(plan))
    return executor, scheduler.schedule()


def test_the_right_plan_passes() -> None:
    executor, plan = after_two_steps()
    expected = ToyModel(97).generate(toy_request("a", range(2, 8), 9))
    assert executor.execute(plan).verified.token_ids.tolist() == expected[2:3]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda plan: dataclasses.replace(plan, num_computed_tokens=i32(8), num_new_tokens=i32(1)), r"tokens \[8, 9\)"),
        (lambda plan: dataclasses.replace(plan, num_new_tokens=i32(2)), r"tokens \[7, 9\) of 8"),
        (lambda plan: dataclasses.replace(plan, num_new_tokens=i32(0)), "a row without tokens"),
        (lambda plan: dataclasses.replace(plan, finished_ids=("z",)), "z is dropped, but was not known"),
        (
            lambda plan: dataclasses.replace(plan, num_new_tokens=i32(2), draft=DraftTokens(i32(3), i32(0, 1))),
            "no block for 8",
        ),
    ],
)
def test_a_wrong_plan_is_noticed(spoil: Callable[[SchedulerOutput], SchedulerOutput], message: str) -> None:
    executor, plan = after_two_steps()
    with pytest.raises(AssertionError, match=message):
        executor.execute(spoil(plan))


def test_a_wrong_block_table_is_noticed() -> None:
    executor, plan = after_two_steps()
    executor._rows["a"].block_ids.reverse()
    with pytest.raises(AssertionError, match="KV at 0 is"):
        executor.execute(plan)


def test_a_token_that_was_skipped_is_noticed() -> None:
    executor, plan = after_two_steps()
    del executor._kv[executor._slot(executor._rows["a"], 6)]
    with pytest.raises(AssertionError, match="KV at 6 is None"):
        executor.execute(plan)


def drafting() -> tuple[ToyExecutor, SchedulerOutput]:
    """The same with right drafts of a model with KV: the plan has 3, and 3 may follow."""
    request = toy_request("a", range(2, 8), 20)
    executor = ToyExecutor(toy_info(max_draft_tokens=3, num_lookahead_slots=3), oracle([request]))
    scheduler = Scheduler(toy_config(), executor.model_info, NoKVConnector())
    scheduler.add(request)
    for _ in range(2):
        plan = scheduler.schedule()
        commit_result(scheduler.pool, plan, executor.execute(plan))
    return executor, scheduler.schedule()


def test_more_drafts_than_a_request_wants_are_noticed() -> None:
    executor, plan = drafting()
    with pytest.raises(AssertionError, match="a: 4 drafts planned, 3 wanted"):
        executor.execute(dataclasses.replace(plan, max_draft_len=i32(4)))


@pytest.mark.parametrize("part", ["token_ids", "sources"])
def test_drafts_that_nobody_proposed_are_noticed(part: str) -> None:
    executor, plan = drafting()
    spoiled = dataclasses.replace(plan.draft, **{part: getattr(plan.draft, part) - 1})
    with pytest.raises(AssertionError, match=r"a: drafts \["):
        executor.execute(dataclasses.replace(plan, draft=spoiled))


def test_blocks_without_draft_kv_are_noticed() -> None:
    executor, plan = drafting()
    for position in range(4):
        del executor.draft_layers._kv[executor._slot(executor._rows["a"], position + 1)]
    with pytest.raises(AssertionError, match="a: draft KV at 1 is None"):
        executor.execute(plan)


def test_a_slot_ahead_that_is_another_requests_is_noticed() -> None:
    executor, _ = drafting()
    layers, rows = executor.draft_layers, [0, 1, 2, 3, 4]
    layers.begin("other", 0)
    layers.run("other", rows, list(range(17)), 16, 0)
    layers.begin("intruder", 0)
    layers.run("intruder", [9, rows[0]], list(range(4)), 3, 3)
    with pytest.raises(AssertionError, match="other: draft KV at 1 is"):
        layers.run("other", rows, list(range(18)), 17, 0)


def test_the_draft_is_as_long_as_the_slots_allow() -> None:
    executor, _ = drafting()
    layers = executor.draft_layers
    layers.begin("b", 0)
    assert layers.run("b", [9, 10], list(range(6)), 5, 3) == 3
    assert layers.run("b", [9, 10], list(range(7)), 6, 3) == 2
    assert layers.run("b", [9, 10], list(range(9)), 8, 3) == 0, "no slot for the newest token"
    assert layers.run("b", [9, 10, 11], list(range(9)), 8, 3) == 3
