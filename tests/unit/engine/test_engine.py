"""What comes out: ends, aborts, failures, log-probabilities, metrics, and what is refused at the door."""

from __future__ import annotations

import dataclasses

import pytest

from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import BadRequest, InternalError, Overloaded
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import FinishReason, SchedulerOutput, StepResult
from tests.doubles.connectors import ToyConnector
from tests.doubles.engines import EOS, Transcript, run_to_end, toy_config, toy_info, toy_request
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel


def make_engine(executor: ToyExecutor | None = None, **config: object) -> Engine:
    return Engine(toy_config(**config), executor or ToyExecutor(toy_info()))  # type: ignore[arg-type]


def test_a_request_runs_to_max_tokens() -> None:
    engine, request = make_engine(), toy_request("a", [2, 3, 4], 5)
    engine.submit(request)
    assert engine.has_work()
    transcript = run_to_end(engine)
    assert transcript.token_ids["a"] == ToyModel(97).generate(request)
    last = transcript.last["a"]
    assert (last.finish_reason, last.stop_reason, last.error) == (FinishReason.LENGTH, None, None)
    assert last.metrics is not None
    assert 0 < last.metrics.arrival_time <= last.metrics.first_scheduled_time
    assert last.metrics.first_scheduled_time <= last.metrics.first_token_time <= last.metrics.finished_time
    assert not engine.has_work()


def test_only_the_last_output_has_an_end_and_metrics() -> None:
    engine = make_engine()
    engine.submit(toy_request("a", [2, 3], 3))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert [output.metrics is None for output in outputs] == [True, True, False]


def test_the_frontend_says_when_a_request_arrived() -> None:
    engine = make_engine()
    engine.submit(dataclasses.replace(toy_request("a", [2], 1), arrival_time=123.0))
    metrics = run_to_end(engine).last["a"].metrics
    assert metrics is not None
    assert metrics.arrival_time == 123.0


def test_an_eos_ends_a_request_and_belongs_to_it() -> None:
    engine = make_engine(ToyExecutor(toy_info(), model=ToyModel(97, eos_rate=1.0)))
    engine.submit(toy_request("a", [2, 3], 9))
    transcript = run_to_end(engine)
    assert transcript.token_ids["a"] == [EOS]
    assert transcript.last["a"].finish_reason is FinishReason.STOP


def test_a_stop_token_is_named() -> None:
    expected = ToyModel(97).generate(toy_request("a", [2, 3], 9))
    engine = make_engine()
    engine.submit(toy_request("a", [2, 3], 9, sampling=SamplingParams(temperature=0.0, stop_token_ids=(expected[4],))))
    transcript = run_to_end(engine)
    assert transcript.token_ids["a"] == expected[: expected.index(expected[4]) + 1]
    assert transcript.last["a"].stop_reason == expected[4]


def test_an_abort_ends_a_waiting_and_a_running_request() -> None:
    executor = ToyExecutor(toy_info())
    engine = make_engine(executor, max_num_seqs=1)
    for name in ("running", "waiting", "other"):
        engine.submit(toy_request(name, [2, 3], 20))
    engine.step()
    outputs = engine.abort(["running", "unknown", "waiting", "running"])
    engine.check_integrity()
    assert [(o.request_id, o.token_ids, o.finish_reason) for o in outputs] == [
        ("running", (), FinishReason.ABORT),
        ("waiting", (), FinishReason.ABORT),
    ]
    assert all(output.metrics is not None for output in outputs)
    engine.step()
    assert executor.known_request_ids == {"other"}
    assert engine.abort(["running"]) == []


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_that_is_not_ready_keeps_its_seat_and_blocks(is_aborted: bool) -> None:
    executor, late, connector = ToyExecutor(toy_info()), toy_request("late", range(2, 12), 5), ToyConnector(0, rate=1.0)
    connector.executor = executor
    engine = Engine(toy_config(max_num_seqs=1), executor, connector)
    engine.submit(late)
    engine.submit(toy_request("other", [2, 3], 3))
    for _ in range(3):
        assert engine.step() == []
        assert engine.is_stalled
        engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting_for_kv) == (1, 1)
    assert (stats.num_running, stats.num_waiting, stats.num_blocks - stats.num_free_blocks) == (1, 1, 3)
    assert executor.known_request_ids == set()
    transcript = Transcript()
    if is_aborted:
        transcript.add(engine.abort(["late"]))
        assert engine.stats().num_free_blocks == stats.num_blocks
        assert not engine.is_stalled
        assert connector.waiting == []
    else:
        connector.finish("late", 9, 0)
    connector.rate = 0.0
    run_to_end(engine, transcript)
    assert transcript.token_ids["late"] == ([] if is_aborted else executor.model.generate(late))
    assert transcript.last["other"].finish_reason is FinishReason.LENGTH


def test_a_preempted_request_can_be_aborted() -> None:
    engine = make_engine(ToyExecutor(toy_info(num_blocks=6)))
    engine.submit(toy_request("a", range(2, 10), 12))
    engine.submit(toy_request("b", range(20, 28), 12))
    transcript = Transcript()
    while engine.stats().num_preempted_waiting == 0:
        transcript.add(engine.step())
    transcript.add(engine.abort(["b"]))
    engine.check_integrity()
    run_to_end(engine, transcript)
    assert transcript.last["b"].finish_reason is FinishReason.ABORT
    assert transcript.last["a"].finish_reason is FinishReason.LENGTH


def test_an_id_can_be_used_again_after_its_end() -> None:
    engine = make_engine()
    engine.submit(toy_request("a", [2, 3], 20))
    engine.step()
    engine.abort(["a"])
    request = toy_request("a", [4, 5, 6], 3)
    engine.submit(request)
    assert run_to_end(engine).token_ids["a"] == ToyModel(97).generate(request)


def test_a_failure_ends_one_request_and_its_blocks_are_not_reused() -> None:
    engine = make_engine(ToyExecutor(toy_info(), failures={"bad": 2}))
    engine.submit(toy_request("bad", range(2, 14), 9))
    engine.submit(toy_request("good", range(40, 44), 9))
    transcript = run_to_end(engine)
    bad = transcript.last["bad"]
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, ("InternalError", "non-finite logits"))
    assert len(transcript.token_ids["bad"]) == 2
    assert transcript.last["good"].finish_reason is FinishReason.LENGTH
    engine.submit(toy_request("again", range(2, 14), 1))
    assert run_to_end(engine).last["again"].num_cached_tokens == 0


def test_a_failure_does_not_take_the_same_block_from_a_request_that_did_not_fail() -> None:
    """Both fill their first block in the step in which one of them fails."""
    engine = make_engine(ToyExecutor(toy_info(), failures={"bad": 1}))
    engine.submit(toy_request("bad", [2, 3, 4], 8))
    engine.submit(toy_request("good", [2, 3, 4], 8))
    transcript = Transcript()
    for _ in range(2):
        transcript.add(engine.step())
        engine.check_integrity()
    assert transcript.last["bad"].finish_reason is FinishReason.ERROR
    engine.submit(toy_request("next", [2, 3, 4, *transcript.token_ids["good"]], 2))
    run_to_end(engine, transcript)
    assert transcript.last["next"].num_cached_tokens == 4


def test_each_request_gets_the_logprobs_it_asked_for() -> None:
    engine = make_engine()
    for name, count in (("none", None), ("chosen", 0), ("two", 2)):
        engine.submit(toy_request(name, [2, 3], 1, sampling=SamplingParams(temperature=0.0, logprobs=count)))
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["none"].logprobs is None
    (chosen,) = outputs["chosen"].logprobs or ()
    (token_id,) = outputs["chosen"].token_ids
    assert (chosen.token_id, chosen.logprob, chosen.rank) == (token_id, -(1.0 + token_id % 7), 1)
    assert (chosen.top_token_ids, chosen.top_logprobs) == ((), ())
    (two,) = outputs["two"].logprobs or ()
    assert two.top_token_ids == (token_id, (token_id + 1) % 97)
    assert two.top_logprobs == (two.logprob, two.logprob - 1.0)


def test_a_request_that_could_never_fit_is_refused() -> None:
    engine = make_engine(ToyExecutor(toy_info(num_blocks=3)))
    engine.submit(toy_request("fits", range(2, 10), 5))
    with pytest.raises(BadRequest, match=r"max_tokens: expected at most 5, .* length is 13 tokens .*, got 6") as error:
        engine.submit(toy_request("too-big", range(2, 10), 6))
    assert error.value.param == "max_tokens"
    assert len(run_to_end(engine).token_ids["fits"]) == 5


def test_a_prompt_longer_than_a_step_needs_chunked_prefill() -> None:
    make_engine(max_num_batched_tokens=4).submit(toy_request("a", range(2, 7)))
    engine = make_engine(max_num_batched_tokens=4, enable_chunked_prefill=False)
    with pytest.raises(BadRequest, match=r"prompt is too long: expected at most 4 tokens, .* got 5"):
        engine.submit(toy_request("a", range(2, 7)))


def test_an_id_in_use_is_refused() -> None:
    engine = make_engine()
    engine.submit(toy_request("a", [2]))
    with pytest.raises(BadRequest, match="request_id: expected one not in use, got 'a'"):
        engine.submit(toy_request("a", [2]))


def test_a_full_queue_refuses_and_an_empty_one_takes_anything() -> None:
    engine = make_engine(max_num_queued_requests=2, max_num_queued_tokens=10)
    engine.submit(toy_request("long", [2] * 30))
    with pytest.raises(Overloaded, match="at most 10 waiting prompt tokens, got 30 and this request's 1"):
        engine.submit(toy_request("b", [2]))
    engine.step()
    engine.submit(toy_request("c", [2]))
    engine.submit(toy_request("d", [2]))
    with pytest.raises(Overloaded, match="fewer than 2 waiting requests, got 2") as error:
        engine.submit(toy_request("e", [2]))
    assert error.value.status == 429
    assert set(run_to_end(engine).last) == {"long", "c", "d"}


class LyingExecutor(ToyExecutor):
    """Answers another step than the one asked for."""

    def execute(self, plan: SchedulerOutput) -> StepResult:
        return dataclasses.replace(super().execute(plan), step_id=plan.step_id + 1)


def test_a_result_of_another_step_is_refused() -> None:
    engine = make_engine(LyingExecutor(toy_info()))
    engine.submit(toy_request("a", [2]))
    with pytest.raises(InternalError, match="expected the rows of step 1, got step 2"):
        engine.step()


def test_stats_count_what_happened() -> None:
    engine = make_engine(max_num_seqs=1)
    for name in "ab":
        engine.submit(toy_request(name, [2, 3, 4], 5))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 1, 3)
    assert (stats.num_blocks, stats.block_size, stats.num_free_blocks) == (32, 4, 31)
    run_to_end(engine)
    stats = engine.stats()
    assert stats.num_finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generated_tokens) == (10, 6, 10)
    assert stats.timings_ms == {"forward": 10.0}
    for name, observed in (("ttft_s", 2), ("tpot_s", 2), ("e2e_s", 2), ("queue_s", 2), ("generated_tokens", 2)):
        assert stats.histograms[name].count == observed
    assert stats.histograms["generated_tokens"].sum == 10
