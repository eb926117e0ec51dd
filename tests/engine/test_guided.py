"""The promise for requests with a grammar: what it allows, whatever is drafted and however the step is made up."""

from __future__ import annotations

import math
import random
import select
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from fastdeploy_sd.cli.verify import (
    PLAIN,
    Answer,
    EngineVariant,
    Reference,
    compare,
    open_engine,
    quick_variants,
    run_cell,
    standard_methods,
)
from fastdeploy_sd.cli.verify.methods import Method
from fastdeploy_sd.cli.verify.runs import run, run_alone
from fastdeploy_sd.cli.verify.variants import ALONE
from fastdeploy_sd.config import ParallelConfig, SpeculativeConfig
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.decision import StepForecast
from fastdeploy_sd.text.guidance.compiler import GrammarStore
from fastdeploy_sd.types import FinishReason, Request, RequestId
from fastdeploy_sd.worker.step import guided_rows
from tests.doubles.engines import Transcript
from tests.engine.guided_requests import KINDS, guided_requests, tokenizer, verify_answer
from tests.engine.handover_pairs import Pair, open_pair
from tests.engine.models import References
from tests.engine.test_exactness import OTHER_WAYS
from tests.engine.test_failing_rows import PHASES, Fault, runner_of
from tests.engine.test_handover import DECODE, PREFILL
from tests.engine.test_resumed_requests import resumed
from tests.engine.test_swap import WAY as SWAPPING
from tests.engine.test_swap import check as check_passes
from tests.engine.test_swap import swapping

pytestmark = pytest.mark.slow

NUM_REQUESTS = 24
# Chunks, prefix hits, preemption; budgets that cut prompts.
CHUNKS, BUDGET = quick_variants()[1], OTHER_WAYS[1]
WAYS = [quick_variants()[0], CHUNKS, BUDGET]
METHODS = [("ngram", 1), ("ngram", 9), ("suffix", 4), ("mtp", 4), ("mtp-ngram", 4), ("mixed", 4), ("auto", 9)]
DEADLINE_MS = 120_000


def method(name: str, num_drafts: int, base: SpeculativeConfig | None = None) -> Method:
    [found] = standard_methods([name], [num_drafts], base)
    return found


@pytest.fixture(scope="module")
def guided(references: References) -> Reference:
    base = references.get("demo").base
    with open_engine(base, ALONE, PLAIN) as engine:
        requests = guided_requests(NUM_REQUESTS, engine.model_info.eos_token_ids)
    return Reference(base, tuple(requests), run_alone(base, requests))


def test_every_answer_is_what_its_grammar_says(guided: Reference) -> None:
    finished = [r for r in guided.requests if r.grammar and guided.answers[r.request_id].finish_reason == "stop"]
    assert len(finished) >= 12
    for request in finished:
        verify_answer(request, guided.answers[request.request_id])
    # Log-probabilities are those of the logits as the model left them, where something else may be more likely.
    ranks = [t.rank for r in finished if r.sampling.temperature == 0 for t in guided.answers[r.request_id].logprobs]
    assert max(ranks) > 1


@pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
def test_same_tokens_whatever_the_way(guided: Reference, way: EngineVariant) -> None:
    cell = run_cell(guided.base, way, PLAIN, guided.requests, guided.answers)
    assert cell.difference is None


@pytest.mark.parametrize(("name", "k"), METHODS)
def test_same_tokens_whatever_the_method(guided: Reference, name: str, k: int) -> None:
    with open_engine(guided.base, BUDGET if k == 4 else CHUNKS, method(name, k)) as engine:
        answers = run(engine, method(name, k).apply(guided.requests), 3)
        assert compare(guided.answers, answers) is None
        drafts = engine.stats().drafts["grammar"]
        # Its tokens are hardly ever anything else.
        assert sum(drafts.accepted) > 0.8 * sum(drafts.reached) > 80


def test_forced_tokens_are_drafts_where_guesses_are_off(guided: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method auto has found that guesses lose: what a grammar forces is none."""
    learn = DraftController.observe_and_decide

    def demand(*args: Any, **how: Any) -> StepForecast:
        return learn(*args, **(how | {"decides": False}))._replace(least_gain=math.inf, is_off=1.0)

    monkeypatch.setattr(DraftController, "observe_and_decide", demand)
    auto = method("auto", 9)
    with open_engine(guided.base, CHUNKS, auto) as engine:
        assert compare(guided.answers, run(engine, auto.apply(guided.requests), 3)) is None
        stats = engine.stats()
    assert sum(stats.drafts["grammar"].accepted) > 0.8 * sum(stats.drafts["grammar"].reached) > 80
    assert not any(sum(counts.drafted) for source, counts in stats.drafts.items() if source != "grammar")


def test_same_tokens_on_two_ranks(guided: Reference) -> None:
    base = replace(guided.base, parallel=ParallelConfig(tensor_parallel_size=2, rank_timeout_s=60.0))
    cell = run_cell(base, CHUNKS, method("mtp-ngram", 4), guided.requests, guided.answers)
    assert cell.difference is None


@pytest.mark.parametrize("way", [CHUNKS, BUDGET], ids=lambda way: way.name)
def test_the_rest_of_an_output_is_the_same(guided: Reference, way: EngineVariant) -> None:
    requests, rest = resumed(guided, random.Random(way.name))
    with open_engine(guided.base, replace(way, num_passes=1), method("ngram", 4)) as engine:
        assert compare(rest, run(engine, requests, 3)) is None


@pytest.mark.parametrize(("decode", "prefill"), [("ngram", "naive"), ("mtp-ngram", "mtp")])
def test_two_engines_give_the_bytes_of_one(guided: Reference, decode: str, prefill: str) -> None:
    """The first token is drawn, and drafts are made, where the prompt is computed."""
    ways = (DECODE, method(decode, 4)), (PREFILL, method(prefill, 2))
    with open_pair(guided, *ways, seed=1) as pair:
        assert compare(guided.answers, run_pair(pair, guided)) is None
        stats = pair.decode.stats()
        assert stats.num_supplied_tokens["prefill"] > 500
        # The first token that comes with a prompt is the one that the grammar and the seed give.
        handed_over = stats.drafts["handed_over"]
        assert handed_over.accepted[0] == handed_over.reached[0] > 12
        assert pair.wire.num_failed == 0


def test_a_grammar_that_a_prefill_engine_refuses_ends_its_own_orders_only(
    guided: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine then computes those prompts itself."""
    refused = KINDS[0].grammar
    with open_pair(guided, (DECODE, method("ngram", 4)), (PREFILL, PLAIN), seed=1) as pair:
        grammars = pair.prefill._executor.grammars
        assert isinstance(grammars, GrammarStore)
        compile_one = grammars._compile
        monkeypatch.setattr(grammars, "_compile", lambda g: (None, "too large") if g == refused else compile_one(g))
        assert compare(guided.answers, run_pair(pair, guided)) is None
        num_refused = sum(request.grammar == refused for request in guided.requests)
        assert pair.wire.num_failed == num_refused > 1
        assert pair.wire.num_whole == pair.wire.num_begun - num_refused > 12
        # Some were there when it failed, others came later.
        assert 0 < pair.prefill.stats().num_finished["error"] <= num_refused


def run_pair(pair: Pair, guided: Reference) -> dict[RequestId, Answer]:
    """Run all requests; turns wait for the grammars that are being compiled."""

    def wait() -> None:
        for preparing in (engine._pool.preparing for engine in (pair.decode, pair.prefill)):
            if len(preparing):
                assert preparing.fd is not None
                poll = select.poll()
                poll.register(preparing.fd, select.POLLIN)
                assert poll.poll(DEADLINE_MS)

    return pair.run(guided.requests, random.Random(0), each_turn=wait)


def test_same_tokens_with_a_second_level_of_the_cache(guided: Reference) -> None:
    column = method("mtp-ngram", 4)
    with swapping(guided, column, replace(SWAPPING, num_blocks=28)) as engine:
        check_passes(guided, engine, guided.requests[:12])
        stats = engine.stats()
        assert stats.swap.num_loaded > 10
        assert sum(stats.drafts["grammar"].accepted) > 50


@pytest.mark.parametrize("strategy", ["greedy", "topp"])
def test_a_lossy_strategy_keeps_to_the_grammar(guided: Reference, strategy: Literal["greedy", "topp"]) -> None:
    """And at temperature 0 to the tokens of plain decoding."""
    column = method("mtp-ngram", 4, SpeculativeConfig(verify_strategy=strategy))
    with open_engine(guided.base, CHUNKS, column) as engine:
        answers = run(engine, guided.requests, 3)
    check(guided, {i: answers[i] for i in answers})
    greedy = {r.request_id: guided.answers[r.request_id] for r in guided.requests if r.sampling.temperature == 0}
    assert compare(greedy, {i: answers[i] for i in greedy}) is None


def test_accepting_all_drafts_keeps_to_the_grammar(guided: Reference) -> None:
    column = method("mtp", 4, SpeculativeConfig(accept_policy="accept_all"))
    with open_engine(guided.base, CHUNKS, column) as engine:
        check(guided, run(engine, guided.requests, 3))


def check(guided: Reference, answers: dict[RequestId, Answer]) -> None:
    reasons = Counter(answers[r.request_id].finish_reason for r in guided.requests if r.grammar)
    assert reasons.keys() <= {FinishReason.STOP, FinishReason.LENGTH}
    assert reasons[FinishReason.STOP] > 8
    for request in guided.requests:
        if answers[request.request_id].finish_reason is FinishReason.STOP:
            verify_answer(request, answers[request.request_id])


@pytest.mark.usefixtures("expects_step_failures")
@pytest.mark.parametrize("phase", PHASES)
def test_a_step_that_fails_is_run_again_as_if_it_had_not(guided: Reference, phase: str) -> None:
    culprits = [r.request_id for r in guided.requests if len(guided.answers[r.request_id].token_ids) > 12][1::5]
    with open_engine(guided.base, replace(CHUNKS, num_passes=1), method("mtp-ngram", 4)) as engine:
        fault = Fault(culprits)
        fault.install(runner_of(engine), phase)
        answers = run(engine, guided.requests, 3)
        assert fault.num_raised > len(culprits)
    assert {answers[i].finish_reason for i in culprits} == {FinishReason.ERROR}
    assert compare(
        {i: answer for i, answer in guided.answers.items() if i not in culprits},
        {i: answer for i, answer in answers.items() if i not in culprits},
    ) is None  # fmt: skip


def test_a_request_whose_other_rules_leave_no_token_ends_with_an_error_that_says_so(guided: Reference) -> None:
    """After as many tokens as there are; no other request is affected."""
    ends = guided.requests[0].eos_token_ids
    sampling = SamplingParams(temperature=0.0)
    doomed = Request(
        "doomed", np.array([9, 8, 7], np.int32), sampling, 9, 1, ends, ((501,),), grammar="start: <[500]> <[501]>"
    )
    for name, k in (("ngram", 4), ("mtp", 2)):
        with open_engine(guided.base, CHUNKS, method(name, k)) as engine:
            transcript, others = Transcript(), guided.requests[:4]
            for request in (*others, doomed):
                engine.submit(request)
            while engine.has_work():
                transcript.add(engine.step())
                engine.wait_for_arrival(1.0)
        last = transcript.last["doomed"]
        assert tuple(transcript.token_ids["doomed"]) == (500,)
        assert last.finish_reason is FinishReason.ERROR
        assert last.error is not None
        assert last.error[0] == "BadRequest"
        assert "no token is left" in last.error[1]
        for request in others:
            assert tuple(transcript.token_ids[request.request_id]) == guided.answers[request.request_id].token_ids


@pytest.mark.parametrize(("name", "k"), [("ngram", 9), ("mtp-ngram", 4)])
def test_same_tokens_whether_masks_are_computed_in_a_step_or_off_it(
    guided: Reference, name: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps have no time for any mask: requests are held before their token, or after it."""
    choice = random.Random(k)
    monkeypatch.setattr(guided_rows, "share_s", lambda num_requests: choice.choice([0.0, 1.0, 1.0]))
    drafting = method(name, k)
    with open_engine(guided.base, CHUNKS, drafting) as engine:
        answers = run(engine, drafting.apply(guided.requests), 3)
        stats = engine.stats().grammars
    assert compare(guided.answers, answers) is None
    assert min(stats.num_masks, stats.num_late_masks) > 50


def test_an_ambiguous_grammar_harms_nobody(guided: Reference) -> None:
    """Its masks take longer with each token. What the others get is what they get without it."""
    text = 'start: s\ns: s s | s s s | "a" | \n'
    ends = guided.requests[0].eos_token_ids
    sampling = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(ends, -100.0))
    attack = Request("attack", np.array([5, 6], np.int32), sampling, 110, 3, ends, grammar=text)
    with open_engine(guided.base, ALONE, PLAIN) as engine:
        alone = run(engine, [attack], 1)["attack"]
    drafting = method("ngram", 9)
    with open_engine(guided.base, CHUNKS, drafting) as engine:
        answers = run(engine, drafting.apply([attack, *guided.requests]), 3)
        stats = engine.stats().grammars
    assert compare({**guided.answers, "attack": alone}, answers) is None
    assert set(tokenizer().decode(list(alone.token_ids), skip_hidden=True)) == {"a"}
    assert stats.num_late_masks + stats.num_masks > 100
