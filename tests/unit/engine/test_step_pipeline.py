"""Steps that are prepared, and outputs that are handed out, while a step runs: no request gets another token for that.

The toy executor reads every row's whole context back from its cache, and runs steps as late as it may: a block that was
given away too early, or a row whose token is counted twice, shows.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.types import FinishReason
from tests.doubles.engines import Transcript, run_to_end, toy_config, toy_info, toy_request
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_launcher import ToyLauncher
from tests.unit.engine.test_engine_properties import build_scenario, check_outcome, drive


@pytest.mark.slow
@pytest.mark.parametrize("connector_rate", [0.0, 0.5])
def test_any_schedule_gives_the_plain_tokens(connector_rate: float) -> None:
    """Also with KV from elsewhere, which is written when it comes, and not in the order of the steps."""
    seen = Counter[str]()
    for seed in range(40):
        has_store = seed % 3 == 0
        scenario = build_scenario(seed, "oracle", connector_rate, has_store=has_store, launches=True)
        rng = random.Random(seed + 1)
        transcript, aborted = drive(scenario, rng, abort_rate=rng.choice([0.0, 0.2]))
        check_outcome(scenario, transcript, aborted)
        launcher, stats = scenario.executor.launcher, scenario.engine.stats()
        assert isinstance(launcher, ToyLauncher)
        assert scenario.plans == launcher.finished
        ahead = bool(launcher.num_ahead)
        drafts = scenario.executor.model_info.speculation.max_draft_tokens > 0
        seen += Counter(
            ahead=launcher.num_ahead, others=len(scenario.plans) - launcher.num_ahead,
            resting=launcher.num_ahead * drafts,
            preempted=stats.num_preemptions, hits=stats.num_prefix_hits, accepted=stats.num_accepted_tokens,
            aborted=len(aborted) * ahead, stopped=stats.num_finished["stop"] * ahead,
            full=stats.num_finished["length"] * ahead, failed=stats.num_finished["error"] * ahead,
        )  # fmt: skip
    assert len(seen) == 10
    assert min(seen.values()) >= 5, seen


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["oracle", "random"])
def test_any_number_of_right_drafts_gives_the_plain_tokens(proposer: str) -> None:
    """How many there are is known when the next step is under way."""
    seen = Counter[str]()
    for seed in range(40):
        scenario = build_scenario(seed, proposer, has_store=seed % 3 == 0, launches=True, drafts_async=True)
        rng = random.Random(seed + 1)
        transcript, aborted = drive(scenario, rng, abort_rate=rng.choice([0.0, 0.2]))
        check_outcome(scenario, transcript, aborted)
        launcher, stats = scenario.executor.launcher, scenario.engine.stats()
        assert isinstance(launcher, ToyLauncher)
        ahead = bool(launcher.num_ahead)
        seen += Counter(
            ahead=launcher.num_ahead, others=len(scenario.plans) - launcher.num_ahead,
            preempted=stats.num_preemptions, hits=stats.num_prefix_hits,
            accepted=stats.num_accepted_tokens * ahead,
            rejected=(stats.num_draft_tokens - stats.num_accepted_tokens) * ahead,
            aborted=len(aborted) * ahead, stopped=stats.num_finished["stop"] * ahead,
            full=stats.num_finished["length"] * ahead, failed=stats.num_finished["error"] * ahead,
        )  # fmt: skip
    if proposer == "oracle":  # all right, but where blocks are short fewer are made than a plan counted on
        assert seen.pop("rejected", 0) <= 0.01 * seen["accepted"]
    assert len(seen) == 9 + (proposer == "random")
    assert min(seen.values()) >= 5, seen


def launching_engine(num_blocks: int = 16) -> tuple[Engine, ToyLauncher]:
    """Every step runs when a caller waits for it."""
    executor = ToyExecutor(toy_info(num_blocks=num_blocks))
    executor.launcher = launcher = ToyLauncher(executor, 0, late_rate=1.0, open_rate=1.0)
    return Engine(toy_config(), executor), launcher


def test_every_step_is_started_before_the_one_before_it_is_over() -> None:
    engine, launcher = launching_engine()
    engine.submit(toy_request("a", [5, 6, 7], 6))
    assert engine.step() == []  # the first step was started
    transcript = run_to_end(engine)
    assert len(transcript.token_ids["a"]) == 6
    assert [len(plan.request_ids) for plan in launcher.finished] == [1] * 6
    assert launcher.num_ahead == 5


def test_a_request_that_was_aborted_keeps_its_blocks_until_its_step_is_over() -> None:
    engine, _ = launching_engine()
    engine.submit(toy_request("a", [5, 6, 7, 8, 9], 6))
    engine.step()
    [output] = engine.abort(["a"])
    assert output.finish_reason is FinishReason.ABORT
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks < stats.num_blocks
    engine.check_integrity()
    assert engine.has_work()
    assert engine.step() == []
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert not engine.has_work()


def test_a_name_may_come_again_while_a_step_of_its_last_owner_runs() -> None:
    engine, _ = launching_engine()
    first, second = toy_request("a", [5, 6, 7], 6), toy_request("a", [8, 9], 4)
    engine.submit(first)
    for _ in range(3):
        engine.step()
    engine.abort(["a"])
    engine.submit(second)
    assert run_to_end(engine).token_ids["a"] == run_alone(second)


def test_who_ends_by_length_is_in_no_step_behind_its_last() -> None:
    engine, launcher = launching_engine()
    engine.submit(toy_request("long", [5, 6], 5))
    engine.submit(toy_request("short", [7, 8], 2))
    run_to_end(engine)
    assert [plan.request_ids for plan in launcher.finished] == [("long", "short")] * 2 + [("long",)] * 3


def run_alone(request: object) -> list[int]:
    executor = ToyExecutor(toy_info())
    engine = Engine(toy_config(), executor)
    engine.submit(request)  # type: ignore[arg-type]
    transcript: Transcript = run_to_end(engine)
    return transcript.token_ids["a"]
