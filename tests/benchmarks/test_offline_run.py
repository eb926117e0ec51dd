"""Timing a batch: which steps count, which tokens, and that speculation shows in the numbers."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.offline_run import Sample, Workload, acceptance, phase_ms, run_once
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import InternalError
from tests.doubles.engines import toy_config, toy_info
from tests.doubles.proposers import OracleProposer
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel


def run(workload: Workload, executor: ToyExecutor | None = None) -> Sample:
    engine = Engine(toy_config(), executor or ToyExecutor(toy_info(num_blocks=64)))
    return run_once(engine, workload, repeat=0)


@pytest.mark.usefixtures("ticking")
def test_batch_that_starts_in_one_step() -> None:
    sample = run(Workload(batch=2, prompt_len=4, output_len=5))
    # The start is at 0 and each step takes from one tick to the next: the first ends at 2, the others two ticks later.
    assert sample.ttft_s == [2.0, 2.0]
    assert sample.e2e_s == [10.0, 10.0]
    assert sample.gaps_s == [2.0] * 8
    assert (sample.prefill_s, sample.total_s) == (2.0, 10.0)
    assert sample.window_steps_s == [1.0] * 4
    assert sample.window_tokens == 2 * 4


@pytest.mark.usefixtures("ticking")
def test_window_begins_when_the_last_prompt_is_done_and_ends_with_the_first_request() -> None:
    # Prompts of 12 tokens in steps of 16: the second request starts one step after the first.
    sample = run(Workload(batch=2, prompt_len=12, output_len=5))
    assert sample.ttft_s == [2.0, 4.0]
    assert sample.prefill_s == 4.0
    # The first request has 5 tokens after 5 steps; two of the steps were before the window.
    assert len(sample.window_steps_s) == 3
    assert sample.window_tokens == 2 * 3


def test_plain_decoding_is_one_token_per_step() -> None:
    sample = run(Workload(batch=3, prompt_len=4, output_len=6))
    assert acceptance(sample.window_stats) == (None, 1.0)
    phases = {"batch_ms": 0.0, "forward_ms": 1.0, "verify_ms": 0.0, "draft_ms": 0.0, "idle_ms": 0.0}
    assert phase_ms(sample.window_stats) == phases


def test_accepted_drafts_show() -> None:
    info = toy_info(num_blocks=64, max_draft_tokens=3)
    workload = Workload(batch=2, prompt_len=4, output_len=13)
    longer = dataclasses.replace(workload, output_len=32).requests(0, info.vocab_size)
    model = ToyModel(info.vocab_size)
    continuations = {r.request_id: [*r.prompt_token_ids.tolist(), *model.generate(r)] for r in longer}
    executor = ToyExecutor(info, OracleProposer(continuations, info.vocab_size))
    sample = run(workload, executor)
    assert acceptance(sample.window_stats) == (1.0, 4.0)
    assert sample.window_tokens == 2 * 12
    expected = {r.request_id: continuations[r.request_id][4 : 4 + 13] for r in longer}
    assert sample.token_ids == expected
    assert len(sample.window_steps_s) == 3


def test_repeats_have_prompts_of_their_own_and_are_repeatable() -> None:
    workload = Workload(batch=2, prompt_len=8, output_len=2, seed=3)
    prompts = [[r.prompt_token_ids.tolist() for r in workload.requests(repeat, 97)] for repeat in (0, 0, 1)]
    assert prompts[0] == prompts[1]
    assert all(a != b for a in prompts[0] for b in prompts[2])
    assert prompts[0][0] != prompts[0][1]
    other = dataclasses.replace(workload, seed=4).requests(0, 97)
    assert other[0].prompt_token_ids.tolist() != prompts[0][0]


def test_failed_request_is_an_error() -> None:
    executor = ToyExecutor(toy_info(num_blocks=64), failures={"bench-0-1": 2})
    with pytest.raises(InternalError):
        run(Workload(batch=2, prompt_len=4, output_len=6), executor)
