"""What a plan holds of drafting: the drafts to verify, how many may follow, and the blocks for both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.config import SplitwiseConfig
from fastdeploy_sd.engine.interfaces.kv_connector import NoKVConnector
from fastdeploy_sd.engine.requests.request_counters import RequestCounters
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.engine.scheduler import Scheduler
from fastdeploy_sd.engine.step_builder import StepBuilder
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import Speculation, SpeculationInfo
from tests.doubles.bench import VOCAB, Bench, oracle
from tests.doubles.engines import toy_config, toy_info, toy_request
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel

OFF, NGRAM, ONE = Speculation(enabled=False), Speculation(method="ngram"), Speculation(num_speculative_tokens=1)


def test_drafts_run_as_the_last_tokens_of_a_row() -> None:
    request = toy_request("a", range(2, 7), 20)
    bench = Bench(info={"max_draft_tokens": 3}, proposer=oracle([request]))
    bench.submit(request)
    assert bench.step() == {"a": 5}
    assert bench.plans[-1].draft.token_ids.size == 0
    assert bench.step() == {"a": 4}
    assert bench.plans[-1].draft.token_ids.tolist() == ToyModel(VOCAB).generate(request)[1:4]
    assert bench.transcript.token_ids["a"] == ToyModel(VOCAB).generate(request)[:5]


def test_max_draft_len_is_zero_inside_a_prompt_and_shrinks_towards_the_end() -> None:
    request = toy_request("a", range(2, 22), 8)
    bench = Bench(info={"max_draft_tokens": 3}, max_num_batched_tokens=12, max_num_seqs=3)
    bench.submit(request)
    bench.finish()
    # Outputs after each step: 0, 1, 2, ... 8. The drafts after output n may be 8 - n - 1 at most.
    assert [plan.max_draft_len.tolist() for plan in bench.plans] == [[0], [3], [3], [3], [3], [2], [1], [0], [0]]


def num_ahead(bench: Bench) -> list[int]:
    return [plan.num_prompt_tokens_ahead for plan in bench.plans]


def num_prompt_tokens(bench: Bench) -> list[int]:
    """Of each plan, those of its rows that do not choose a token."""
    rows = [zip(p.num_new_tokens.tolist(), np.diff(p.draft.cu_num_draft).tolist(), strict=True) for p in bench.plans]
    return [sum(new - 1 - draft for new, draft in plan) for plan in rows]


@pytest.mark.parametrize("threshold", [0, 5])
def test_a_plan_says_how_much_of_prompts_the_next_one_holds(threshold: int) -> None:
    """Beside a request that decodes, a prompt of several chunks, and one that waits until the budget allows."""
    requests = [toy_request("a", [2, 3], 40), toy_request("b", range(2, 32), 9), toy_request("c", range(60, 69), 9)]
    bench = Bench(
        info={"max_draft_tokens": 2}, max_num_batched_tokens=12, max_num_seqs=3, long_prefill_token_threshold=threshold
    )
    bench.submit(requests[0])
    bench.step()
    assert num_ahead(bench) == [0]
    bench.submit(*requests[1:])
    for _ in range(8):
        bench.step()
    # What is foreseen comes, but for the one token of the row itself that is no part of a prompt.
    foreseen, come = num_ahead(bench)[1:-1], num_prompt_tokens(bench)[2:]
    assert [ahead > 0 for ahead in foreseen] == [count > 0 for count in come]
    assert all(count <= ahead <= count + 2 for ahead, count in zip(foreseen, come, strict=True))
    assert max(foreseen) >= 8
    assert min(foreseen) == 0


def test_nothing_is_foreseen_that_finds_no_seat_or_is_for_others() -> None:
    requests = [toy_request(name, range(2, 12), 20) for name in "abc"]
    bench = Bench(info={"max_draft_tokens": 2}, max_num_batched_tokens=12, max_num_seqs=2)
    bench.submit(*requests)
    for _ in range(4):
        bench.step()
    assert num_ahead(bench) == [8, 0, 0, 0]  # of b, which c does not follow
    config = toy_config(max_num_batched_tokens=12, max_num_seqs=2)
    role = replace(config, splitwise=SplitwiseConfig(splitwise_role="prefill"))
    scheduler = Scheduler(role, toy_info(max_draft_tokens=2), NoKVConnector())
    scheduler.add(requests[0])
    scheduler.add(requests[1])
    assert scheduler.schedule().num_prompt_tokens_ahead == 0


def test_where_nobody_drafts_no_plan_says_how_much_until_a_request_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    execute, skip_draft_steps = ToyExecutor.execute, iter([0, 2, 1, 0, 24, 23, 22])
    monkeypatch.setattr(
        ToyExecutor, "execute", lambda self, plan: replace(execute(self, plan), skip_draft_steps=next(skip_draft_steps))
    )
    requests = [toy_request(name, [2, 3], 20) for name in "ab"]
    bench = Bench(info={"max_draft_tokens": 2}, max_num_batched_tokens=12, max_num_seqs=2)
    bench.submit(requests[0])
    for _ in range(6):
        bench.step()
    bench.submit(requests[1])
    bench.step()
    assert [plan.max_draft_len.tolist() for plan in bench.plans] == [[2], [2], [0], [0], [2], [0], [2, 2]]


def test_drafts_starve_nobody() -> None:
    first, *others = requests = [toy_request(name, [2, 3, 4], 40) for name in "abcd"]
    bench = Bench(info={"max_draft_tokens": 2}, proposer=oracle(requests), max_num_batched_tokens=13, max_num_seqs=4)
    bench.submit(first)
    bench.step()
    bench.submit(*others)
    assert bench.step() == {"a": 3, "b": 3, "c": 3, "d": 3}
    assert bench.step() == {"a": 3, "b": 3, "c": 3, "d": 3}
    assert np.diff(bench.plans[-1].draft.cu_num_draft).tolist() == [2, 2, 2, 2]


def test_a_missing_block_shortens_the_draft_and_preempts_nobody() -> None:
    requests = [toy_request("a", range(2, 7), 12), toy_request("b", range(20, 27), 4)]
    bench = Bench(info={"num_blocks": 4, "max_draft_tokens": 7}, proposer=oracle(requests), max_num_batched_tokens=40)
    bench.submit(*requests)
    assert bench.step() == {"a": 5, "b": 7}
    # a: 6 tokens in 2 blocks of 4, 7 drafts wanted, no block left: 2 fit. b has 8 tokens in 2 blocks: no draft fits.
    assert bench.step() == {"a": 3, "b": 1}
    assert bench.plans[-1].preempted_ids == ()


def test_drafts_get_as_many_blocks_as_there_are() -> None:
    requests = [toy_request("a", range(2, 9), 10), toy_request("b", [20, 21], 2)]
    bench = Bench(info={"num_blocks": 4, "max_draft_tokens": 7}, proposer=oracle(requests), max_num_batched_tokens=40)
    bench.submit(*requests)
    assert bench.step() == {"a": 7, "b": 2}
    # a has 8 tokens in 2 blocks of 4, and 7 drafts need 2 more; there is one.
    assert bench.step() == {"a": 5, "b": 1}


def test_slots_ahead_get_as_many_blocks_as_there_are() -> None:
    info = {"num_blocks": 4, "max_draft_tokens": 7, "num_lookahead_slots": 7}
    bench = Bench(info=info, max_num_batched_tokens=40)
    bench.submit(toy_request("a", range(2, 9), 10), toy_request("b", [20, 21], 2, speculation=OFF))
    bench.step()
    assert bench.num_blocks() == {"a": 3, "b": 1}


def test_drafts_take_no_block_that_another_row_needs_for_its_own_tokens() -> None:
    requests = [toy_request("a", range(2, 7), 12), toy_request("b", range(20, 28), 4)]
    bench = Bench(info={"num_blocks": 5, "max_draft_tokens": 3}, proposer=oracle(requests))
    bench.submit(*requests)
    assert bench.step() == {"a": 5, "b": 8}
    # One block is left. a could use it for its third draft, but b has no slot for its next token; two drafts fit there.
    assert bench.step() == {"a": 3, "b": 3}
    assert bench.plans[-1].preempted_ids == ()


def test_a_request_is_drafted_for_as_it_wishes() -> None:
    speculations = {
        "default": Speculation(),
        "one": ONE,
        "two": Speculation(num_speculative_tokens=2),
        "off": OFF,
        "naive": Speculation(method="naive"),
        "other": NGRAM,
    }
    bench = Bench(
        info={"max_draft_tokens": 3, "num_lookahead_slots": 3},
        max_num_seqs=len(speculations),
        max_num_batched_tokens=24,
    )
    bench.submit(
        *(toy_request(name, [2, 3], 20, speculation=speculation) for name, speculation in speculations.items())
    )
    bench.step()
    assert dict(zip(speculations, bench.plans[-1].max_draft_len.tolist(), strict=True)) == {
        "default": 3, "one": 1, "two": 2, "off": 0, "naive": 0, "other": 3,
    }  # fmt: skip


def test_as_many_drafts_as_the_model_says_must_fit_into_a_step() -> None:
    Scheduler(toy_config(max_num_seqs=4, max_num_batched_tokens=16), toy_info(max_draft_tokens=7), NoKVConnector())
    Scheduler(toy_config(max_num_seqs=4, max_num_batched_tokens=2), toy_info(), NoKVConnector())
    with pytest.raises(AssertionError, match="8 drafts do not fit into a step of 16 tokens"):
        Scheduler(toy_config(max_num_seqs=4, max_num_batched_tokens=16), toy_info(max_draft_tokens=8), NoKVConnector())


def num_draft(bench: Bench) -> list[int]:
    """Of the last plan, by row."""
    return list(np.diff(bench.plans[-1].draft.cu_num_draft).tolist())


def test_who_is_there_shares_the_rows_of_a_step() -> None:
    """A lone request has as many drafts as on a server of one seat, many have what each seat is sure of."""
    requests = [toy_request(f"r{i}", [2, 3, 4], 60) for i in range(8)]
    bench = Bench(info={"max_draft_tokens": 15}, proposer=oracle(requests), max_num_batched_tokens=32, max_num_seqs=8)
    bench.submit(requests[0])
    bench.step()
    assert bench.plans[-1].max_draft_len.tolist() == [15]
    assert bench.step() == {"r0": 16}
    bench.submit(requests[1])
    # Its 15 drafts were made when it was alone: now 7 of them are its share, so that the other runs at once.
    assert bench.step() == {"r0": 8, "r1": 3}
    assert bench.plans[-1].max_draft_len.tolist() == [7, 7]
    assert bench.step() == {"r0": 8, "r1": 8}
    bench.submit(*requests[2:])
    assert bench.step() == {"r0": 4, "r1": 4} | {request.request_id: 3 for request in requests[2:]}
    assert bench.step() == {"r0": 4, "r1": 4} | {request.request_id: 4 for request in requests[2:]}
    assert num_draft(bench) == [3] * 8


def test_who_waits_for_a_seat_that_is_free_counts_among_those_who_share() -> None:
    """Even while the budget is not enough to start them all."""
    requests = [toy_request("a", [2, 3, 4], 60), *(toy_request(name, range(2, 18), 9) for name in "bcde")]
    limits = {"max_num_batched_tokens": 20, "max_num_seqs": 4, "enable_prefix_caching": False}
    bench = Bench(info={"max_draft_tokens": 9}, proposer=oracle(requests), **limits)
    bench.submit(requests[0])
    bench.step()
    assert bench.step() == {"a": 10}
    bench.submit(*requests[1:])
    assert bench.step() == {"a": 5, "b": 15}
    assert bench.step() == {"a": 5, "b": 1, "c": 14}


def test_drafting_with_a_model_gets_slots_ahead_of_the_newest_token() -> None:
    bench = Bench(info={"max_draft_tokens": 3, "num_lookahead_slots": 3}, max_num_seqs=6, max_num_batched_tokens=64)
    bench.submit(
        toy_request("a", range(2, 9), 20),  # 7 tokens, the newest at 7, drafts written from 7, 8 and 9
        toy_request("short", range(2, 7), 20),  # 5 tokens, slots up to 7
        toy_request("one", range(2, 9), 20, speculation=ONE),  # slot 7 only
        toy_request("off", range(2, 9), 20, speculation=OFF),
        toy_request("ngram", range(2, 9), 20, speculation=NGRAM),
        toy_request("ending", range(2, 9), 3),  # one draft at most
    )
    bench.step()
    assert bench.num_blocks() == {"a": 3, "short": 2, "one": 2, "off": 2, "ngram": 2, "ending": 2}


def test_an_unfinished_prompt_gets_no_slots_ahead() -> None:
    bench = Bench(info={"max_draft_tokens": 3, "num_lookahead_slots": 3}, max_num_batched_tokens=16, max_num_seqs=4)
    bench.submit(toy_request("a", range(2, 22), 20))
    bench.step()
    assert bench.num_blocks() == {"a": 5}
    bench.step()
    assert bench.num_blocks() == {"a": 6}


def test_slots_ahead_follow_the_drafts_that_may_be_accepted() -> None:
    request = toy_request("a", range(2, 9), 20)
    bench = Bench(info={"max_draft_tokens": 3, "num_lookahead_slots": 3}, proposer=oracle([request]))
    bench.submit(request)
    bench.step()
    assert bench.step() == {"a": 4}
    assert bench.num_blocks() == {"a": 4}, "7 computed, 4 new, 3 ahead"


def test_drafts_that_were_cut_give_their_budget_back() -> None:
    state = RequestState(toy_request("a", [2], 20), (0, 0), 1.0, SpeculationInfo(), RequestCounters())
    step = StepBuilder(9, [state], np.array([state.counter_row]), [5], [4])
    assert step.budget == 4
    step.shorten_drafts(0, 1)
    assert (step.budget, step.num_new, step.num_draft) == (7, [2], [1])


def test_slots_ahead_end_before_the_last_token_of_a_request() -> None:
    request = toy_request("a", range(2, 8), 7)
    bench = Bench(info={"num_blocks": 3, "max_draft_tokens": 3, "num_lookahead_slots": 3}, proposer=oracle([request]))
    bench.submit(request)
    bench.finish()
    assert bench.num_blocks() == {"a": 3}, "13 tokens, the last of which needs no slot"


def test_slots_ahead_keep_nobody_from_being_admitted() -> None:
    bench = Bench(info={"num_blocks": 4, "max_draft_tokens": 3, "num_lookahead_slots": 3})
    bench.submit(toy_request("a", range(2, 9), 6), toy_request("b", range(20, 25), 4))
    assert bench.step() == {"a": 7, "b": 5}
    assert bench.num_blocks() == {"a": 2, "b": 2}


def test_slots_ahead_take_no_block_that_another_row_needs() -> None:
    # 5 blocks: a has 6 of 8 slots and would write up to slot 8, b has 9 tokens and no slot for the newest.
    bench = Bench(info={"num_blocks": 5, "max_draft_tokens": 3, "num_lookahead_slots": 3})
    bench.submit(toy_request("a", range(2, 7), 12), toy_request("b", range(20, 28), 4, speculation=OFF))
    assert bench.step() == {"a": 5, "b": 8}
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.num_blocks() == {"a": 2, "b": 3}
    assert bench.plans[-1].preempted_ids == ()


def test_blocks_with_and_without_draft_kv_are_not_shared() -> None:
    bench = Bench(info={"max_draft_tokens": 1, "num_lookahead_slots": 1})
    first_steps: dict[str, int] = {}
    for name, speculation in (("mtp", Speculation()), ("ngram", NGRAM), ("mtp-again", ONE), ("off", OFF)):
        bench.submit(toy_request(name, range(2, 15), 2, speculation=speculation))
        first_steps |= bench.step()
        bench.finish()
    assert first_steps == {"mtp": 13, "ngram": 13, "mtp-again": 1, "off": 1}


def test_only_draft_kv_keeps_prefixes_apart() -> None:
    bench = Bench(info={"max_draft_tokens": 1})
    bench.submit(toy_request("a", range(2, 15), 2))
    bench.finish()
    bench.submit(toy_request("b", range(2, 15), 2, speculation=OFF))
    assert bench.step() == {"b": 1}
    assert bench.engine.stats().num_prefix_lost_tokens == 0


def test_hits_that_draft_kv_keeps_apart_are_counted() -> None:
    bench = Bench(info={"max_draft_tokens": 1, "num_lookahead_slots": 1})
    counts = []
    for name, speculation in (("a", OFF), ("b", Speculation()), ("c", Speculation()), ("d", OFF)):
        bench.submit(toy_request(name, range(2, 15), 2, speculation=speculation))
        bench.finish()
        stats = bench.engine.stats()
        counts.append((stats.num_prefix_hit_tokens, stats.num_prefix_lost_tokens))
    assert counts == [(0, 0), (0, 12), (12, 12), (24, 12)], "the second has the first one's prompt, and drafts"
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    bench.submit(toy_request("e", range(2, 19), 2, sampling=sampling))
    bench.finish()
    assert bench.engine.stats().num_prefix_lost_tokens == 12, "it takes no KV over"


def test_no_salt_turns_one_kind_of_block_into_the_other() -> None:
    info = SpeculationInfo("mtp", ("naive", "mtp"), 2, 2)
    plain = RequestState(toy_request("a", [2], speculation=OFF), (0, 0), 1.0, info, RequestCounters()).table.salt
    salts = set()
    for salt in ("", "x", plain, "with draft KV: ", "target KV only: x"):
        for speculation in (Speculation(), OFF):
            request = toy_request("a", [2], cache_salt=salt, speculation=speculation)
            salts.add(RequestState(request, (0, 0), 1.0, info, RequestCounters()).table.salt)
    assert len(salts) == 2 * 5
