"""What becomes known of drafts: log-probabilities in outputs, counts in metrics and statistics."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.engine.commit import step_sources
from fastdeploy_sd.engine.pending_drafts import PendingDrafts
from fastdeploy_sd.engine.requests.request_counters import RequestCounters
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import (
    TARGET,
    DraftCounts,
    DraftLogprob,
    DraftSource,
    DraftTokens,
    FinishReason,
    Speculation,
    StepSources,
    TokenLogprob,
)
from fastdeploy_sd.types.stats import SourceCounts
from tests.doubles.bench import VOCAB, Bench, continuations, oracle
from tests.doubles.engines import toy_request
from tests.doubles.proposers import WrongProposer
from tests.doubles.toy_logprobs import toy_logprob, toy_logprobs
from tests.doubles.toy_model import ToyModel


def wanting(count: int | None) -> Speculation:
    return Speculation(num_draft_logprobs=count)


def draft_logprob(token_id: int, position: int, accepted: bool, num_alternatives: int) -> DraftLogprob:
    logprob = toy_logprob(token_id)
    alternatives = range(num_alternatives)
    entry = TokenLogprob(
        token_id,
        logprob,
        1,
        tuple((token_id + j) % VOCAB for j in alternatives),
        tuple(logprob - j for j in alternatives),
    )
    return DraftLogprob(entry, position, accepted)


def test_draft_logprobs_are_those_of_the_verified_drafts_that_a_model_made() -> None:
    request = toy_request("a", range(2, 7), 20, speculation=wanting(2))
    other = toy_request("b", range(2, 7), 20, speculation=wanting(0))
    silent = toy_request("c", range(2, 7), 20)
    bench = Bench(info={"max_draft_tokens": 3}, proposer=oracle([request, other, silent]))
    bench.submit(request, other, silent)
    bench.step()
    assert [bench.outputs[name].draft_logprobs for name in "abc"] == [(), (), None], "nothing was verified yet"
    bench.step()
    first, second = ToyModel(VOCAB).generate(request)[1:3]  # the third is n-gram's and has no log-probability
    assert bench.outputs["a"].draft_logprobs == (draft_logprob(first, 0, True, 2), draft_logprob(second, 1, True, 2))
    assert bench.outputs["b"].draft_logprobs == (draft_logprob(first, 0, True, 0), draft_logprob(second, 1, True, 0))
    assert bench.outputs["c"].draft_logprobs is None


def test_rejected_drafts_are_reported_as_such() -> None:
    request = toy_request("a", range(2, 7), 20, speculation=wanting(0))
    wrong = WrongProposer(continuations(ToyModel(VOCAB), [request]), VOCAB)
    bench = Bench(info={"max_draft_tokens": 1}, proposer=wrong)
    bench.submit(request)
    bench.step()
    bench.step()
    drafted = (ToyModel(VOCAB).generate(request)[1] + 1) % VOCAB
    assert bench.outputs["a"].draft_logprobs == (draft_logprob(drafted, 0, False, 0),)


def test_an_abort_verifies_nothing() -> None:
    request = toy_request("a", range(2, 7), 20, speculation=wanting(0))
    bench = Bench(info={"max_draft_tokens": 1}, proposer=oracle([request]))
    bench.submit(request)
    bench.step()
    (output,) = bench.engine.abort(["a"])
    assert output.draft_logprobs == ()


def test_preemption_drops_the_drafts_and_their_logprobs() -> None:
    requests = [toy_request(name, range(2, 10), 9, speculation=wanting(0)) for name in "ab"]
    bench = Bench(info={"num_blocks": 6, "max_draft_tokens": 1}, proposer=oracle(requests), enable_prefix_caching=False)
    bench.submit(*requests)
    while not any(new.request.request_id == "b" for plan in bench.plans[1:] for new in plan.new):
        bench.step()
    assert bench.engine.stats().num_preemptions == 1
    assert bench.outputs["b"].draft_logprobs == ()
    assert bench.outputs["b"].token_ids


def test_a_request_is_told_how_its_drafts_came_out() -> None:
    request = toy_request("a", range(2, 7), 12)
    bench = Bench(info={"max_draft_tokens": 3}, proposer=oracle([request]))
    bench.submit(request)
    metrics = bench.finish().last["a"].metrics
    assert metrics is not None
    # 1 output, then 4 and 4, then with 3 tokens left 2 drafts and a bonus.
    assert metrics.drafts == DraftCounts(3, 11, drafted=(3, 3, 2), reached=(3, 3, 2), accepted=(3, 3, 2))
    assert (metrics.num_token_steps, metrics.num_step_tokens, metrics.tokens_per_step) == (4, 12, 3.0)
    assert metrics.accepted_by_source == {"mtp": 6, "ngram": 2}
    assert metrics.gain == 0.0, "the method does not compare"


def test_drafts_past_a_stop_count_nowhere() -> None:
    plain = ToyModel(VOCAB).generate(toy_request("a", range(2, 7), 12))
    assert plain[2] not in plain[:2]
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(plain[2],))
    request = toy_request("a", range(2, 7), 12, sampling=sampling, speculation=wanting(0))
    bench = Bench(info={"max_draft_tokens": 3}, proposer=oracle([request]))
    bench.submit(request)
    last = bench.finish().last["a"]
    assert last.finish_reason is FinishReason.STOP
    assert last.metrics is not None
    # Drafts plain[1], plain[2] and plain[3] were all right; the second ended the request.
    assert last.metrics.drafts == DraftCounts(1, 2, drafted=(1, 1), reached=(1, 1), accepted=(1, 1))
    stats = bench.engine.stats()
    assert stats.drafts["mtp"] == SourceCounts((1, 1), (1, 1), (1, 1))
    assert "ngram" not in stats.drafts
    assert last.token_ids == tuple(plain[1:3])


@pytest.mark.parametrize("end", [1, 2])
def test_a_draft_is_called_accepted_if_it_became_output(end: int) -> None:
    plain = ToyModel(VOCAB).generate(toy_request("a", range(2, 7), 12))
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(plain[end],))
    request = toy_request("a", range(2, 7), 12, sampling=sampling, speculation=wanting(0))
    bench = Bench(info={"max_draft_tokens": 2}, proposer=oracle([request]))
    bench.submit(request)
    reported = bench.finish().last["a"].draft_logprobs
    assert reported is not None
    assert [(d.draft.token_id, d.accepted) for d in reported] == [(plain[1], True), (plain[2], end == 2)]


def test_a_rejected_draft_in_the_place_of_the_last_token_counts() -> None:
    plain = ToyModel(VOCAB).generate(toy_request("a", range(2, 7), 12))
    sampling = SamplingParams(temperature=0.0, stop_token_ids=(plain[1],))
    request = toy_request("a", range(2, 7), 12, sampling=sampling)
    wrong = WrongProposer(continuations(ToyModel(VOCAB), [request]), VOCAB)
    bench = Bench(info={"max_draft_tokens": 3}, proposer=wrong)
    bench.submit(request)
    last = bench.finish().last["a"]
    assert last.metrics is not None
    assert last.metrics.drafts == DraftCounts(1, 1, drafted=(1,), reached=(1,), accepted=(0,))
    assert bench.engine.stats().drafts == {"mtp": SourceCounts((1,), (1,), (0,))}


def test_statistics_are_by_source_and_by_method() -> None:
    speculations = {"a": Speculation(), "b": Speculation(method="ngram"), "c": Speculation(enabled=False)}
    requests = [
        toy_request(name, range(2, 7), 6, speculation=speculation) for name, speculation in speculations.items()
    ]
    info = {"max_draft_tokens": 3, "num_lookahead_slots": 3}
    bench = Bench(info=info, proposer=oracle(requests), max_num_batched_tokens=40)
    bench.submit(*requests)
    bench.step()
    bench.step()
    each = DraftCounts(1, 4, drafted=(1, 1, 1), reached=(1, 1, 1), accepted=(1, 1, 1))
    stats = bench.engine.stats()
    assert stats.verifications == {"mtp": each, "ngram": each}
    assert {source: counts.drafted for source, counts in stats.drafts.items()} == {"mtp": (2, 2), "ngram": (0, 0, 2)}
    bench.finish()
    stats = bench.engine.stats()
    # 5 of 6 tokens are out after two steps, so nothing more was drafted.
    assert stats.verifications == {"mtp": each, "ngram": each}
    assert stats.speculation == bench.info.speculation
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_emitted_tokens) == (6, 6, 8)


def result_of(first: int, count: int, width: int | None, sources: bool) -> DraftTokens:
    """One row of drafts; log-probabilities with `width` alternatives."""
    token_ids = np.arange(first, first + count, dtype=np.int32)
    return DraftTokens(
        token_ids,
        np.array([0, count], np.int32),
        np.full(count, DraftSource.MTP, np.int8) if sources else None,
        None if width is None else toy_logprobs(token_ids, width, VOCAB),
    )


def rows_of(counters: RequestCounters, num_rows: int, max_total_tokens: int = 20) -> np.ndarray:
    """Rows of requests that have a token each."""
    rows = np.array([counters.allocate() for _ in range(num_rows)])
    counters.num_tokens[rows], counters.max_total_tokens[rows] = 1, max_total_tokens
    return rows


def test_drafts_of_different_steps_are_put_together() -> None:
    """A row that the last step left out still has the drafts of the step before."""
    counters = RequestCounters()
    pending, rows = PendingDrafts(counters), rows_of(counters, 4)
    for row, result in (
        (0, result_of(10, 4, 1, True)),
        (1, result_of(20, 3, 2, True)),
        (2, result_of(30, 2, None, False)),
    ):
        pending.keep(rows[row : row + 1], result)
    pending.forget_unwanted(rows)
    drafts = pending.collect(rows, [2, 3, 1, 0])
    assert drafts.token_ids.tolist() == [10, 11, 20, 21, 22, 30]
    assert drafts.cu_num_draft.tolist() == [0, 2, 5, 6, 6]
    assert drafts.sources is not None
    assert drafts.sources.tolist() == [DraftSource.MTP] * 5 + [DraftSource.CUSTOM]
    assert drafts.logprobs is not None
    expected = [*(toy_logprob(token_id) for token_id in (10, 11, 20, 21, 22)), np.nan]
    np.testing.assert_array_equal(drafts.logprobs.logprobs, np.array(expected, np.float32))
    assert drafts.logprobs.top_token_ids[:, 0].tolist() == [10, 11, 20, 21, 22, 0]
    assert drafts.logprobs.top_token_ids[2:5, 1].tolist() == [21, 22, 23]
    assert drafts.logprobs.ranks.tolist() == [1, 1, 1, 1, 1, 0]


def test_the_drafts_of_the_step_before_are_taken_whole_where_nothing_is_left_out() -> None:
    counters = RequestCounters()
    pending, rows = PendingDrafts(counters), rows_of(counters, 3)
    drafts = DraftTokens(np.arange(5, dtype=np.int32), np.array([0, 2, 2, 5], np.int32))
    pending.keep(rows, drafts)
    assert pending.collect(rows, [2, 0, 3]) is drafts
    for taken, counts, token_ids in (
        (rows, [1, 0, 3], [0, 2, 3, 4]),
        (rows[:2], [2, 0], [0, 1]),
        (rows[[0, 2]], [2, 3], [0, 1, 2, 3, 4]),
        (rows[[2, 1, 0]], [3, 0, 2], [2, 3, 4, 0, 1]),
        (rows[[2, 1, 0]], [2, 0, 2], [2, 3, 0, 1]),
    ):
        collected = pending.collect(taken, counts)
        assert collected is not drafts
        assert collected.token_ids.tolist() == token_ids
        assert np.diff(collected.cu_num_draft).tolist() == counts
    # As many of each row as the result holds, but of others' places in it.
    pending.keep(rows[[2, 1, 0]], DraftTokens(np.arange(6, dtype=np.int32), np.array([0, 2, 4, 6], np.int32)))
    pending.forget_unwanted(rows)
    assert pending.collect(rows, [2, 2, 2]).token_ids.tolist() == [4, 5, 2, 3, 0, 1]


def test_a_row_keeps_its_own_span_of_a_result() -> None:
    counters = RequestCounters()
    pending, rows = PendingDrafts(counters), rows_of(counters, 3)
    drafts = DraftTokens(np.arange(6, dtype=np.int32), np.array([0, 1, 3, 6], np.int32))
    pending.keep(rows, drafts)
    collected = pending.collect(rows[::-1], [2, 2, 0])
    assert collected.token_ids.tolist() == [3, 4, 1, 2]
    assert collected.cu_num_draft.tolist() == [0, 2, 4, 4]


def test_drafts_without_sources_and_logprobs_have_none() -> None:
    counters = RequestCounters()
    pending, rows = PendingDrafts(counters), rows_of(counters, 1)
    pending.keep(rows, result_of(5, 3, None, False))
    drafts = pending.collect(rows, [2])
    assert drafts.token_ids.tolist() == [5, 6]
    assert (drafts.sources, drafts.logprobs) == (None, None)


def test_drafts_are_cut_where_no_token_would_fit_behind_them() -> None:
    counters = RequestCounters()
    rows = rows_of(counters, 1, max_total_tokens=5)
    PendingDrafts(counters).keep(rows, result_of(0, 9, None, False))
    assert counters.num_drafts[rows[0]] == 3


def test_sources_follow_the_accepted_path_of_a_tree() -> None:
    """Two first drafts of n-gram's and suffix's, the second with two more after it; the row before has one draft."""
    sources = [DraftSource.MTP, DraftSource.NGRAM, DraftSource.SUFFIX, DraftSource.SUFFIX, DraftSource.GRAMMAR]
    tokens, cu_num_draft = np.arange(5, dtype=np.int32), np.array([0, 1, 5], np.int32)
    drafts = DraftTokens(tokens, cu_num_draft, np.array(sources, np.int8), None, np.array([-1, -1, -1, 1, 2], np.int32))
    drafted = {"ngram": 1, "suffix": 2, "grammar": 1}
    whole = StepSources((("suffix", 2), ("grammar", 1), (TARGET, 1)), drafted)
    assert step_sources(drafts, 1, [1, 2, 3], 4) == whole
    assert step_sources(drafts, 1, [1], 1) == StepSources((("suffix", 1),), drafted), "it ended the request"
    assert step_sources(drafts, 0, [], 1) == StepSources(((TARGET, 1),), {"mtp": 1})
