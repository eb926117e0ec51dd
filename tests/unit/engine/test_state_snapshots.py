"""Prefix hits of a model with recurrent states: what a snapshot is taken of, who finds it, and who loses it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

import pytest

from fastdeploy_sd.engine.kvcache import state_cache
from fastdeploy_sd.spec_decode.proposer import Proposer
from fastdeploy_sd.types import LIVE_STATE, NO_STATE, Request
from tests.doubles.bench import VOCAB, Bench, continuations
from tests.doubles.engines import toy_request
from tests.doubles.proposers import OracleProposer, RandomLengthProposer, WrongProposer
from tests.doubles.toy_model import ToyModel

BLOCK, INTERVAL = 4, 16
METHODS = ("none", "oracle", "wrong", "random")


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "_INTERVAL", INTERVAL)


def bench_for(requests: Sequence[Request], method: str = "none", num_snapshots: int = 500, **config: object) -> Bench:
    known = continuations(ToyModel(VOCAB), requests)
    proposers: dict[str, Proposer] = {
        "oracle": OracleProposer(known, VOCAB),
        "wrong": WrongProposer(known, VOCAB),
        "random": RandomLengthProposer(known, VOCAB, 1),
    }
    info = {"num_blocks": 2000, "num_state_snapshots": num_snapshots, "max_draft_tokens": 0 if method == "none" else 6}
    return Bench(info=info, proposer=proposers.get(method), **config)


def hits_of(bench: Bench, requests: Sequence[Request]) -> list[int]:
    """Run one after the other; returns how many tokens of each prompt were cached."""
    found = []
    for request in requests:
        bench.submit(request)
        outputs = list(bench.finish().last.values())
        found.append(outputs[-1].num_cached_tokens)
    return found


class TextModel:
    """What is cached, as plain texts, if nothing is ever overwritten."""

    def __init__(self, *, has_states: bool = True) -> None:
        self._blocks, self._snapshots = set[tuple[int, ...]](), set[tuple[int, ...]]()
        self._has_states = has_states

    def run(self, prompt: Sequence[int], text: Sequence[int]) -> int:
        """Note that a prompt was run as far as `text`, of which all is computed; returns what it could reuse."""
        last = (len(prompt) - 1) // BLOCK * BLOCK
        borders = range(last, 0, -BLOCK)
        branch = next((end for end in borders if tuple(prompt[:end]) in self._blocks), 0)
        hit = next((end for end in borders if end <= branch and tuple(prompt[:end]) in self._snapshots), 0)
        newest = len(text) // BLOCK * BLOCK
        for end in range(BLOCK, newest + 1, BLOCK):
            self._blocks.add(tuple(text[:end]))
            if end > hit and (end in (last, branch, newest) or (end % INTERVAL == 0 and end < last)):
                self._snapshots.add(tuple(text[:end]))
        return hit if self._has_states else branch


def texts(seed: int) -> list[Request]:
    """Conversations of several turns, and prompts that leave one another at random places."""
    rng, model, requests = random.Random(seed), ToyModel(VOCAB), list[Request]()
    stem = [rng.randrange(2, VOCAB) for _ in range(40)]
    prompt = stem[: rng.randint(1, 40)]
    for i in range(12):
        request = toy_request(f"r{i}", prompt, rng.randint(1, 20))
        requests.append(request)
        answer = list(islice(model.endless(request), request.max_tokens))
        tail = [rng.randrange(2, VOCAB) for _ in range(rng.randint(0, 9))]
        if rng.random() < 0.5:
            prompt = [*prompt, *answer, *tail][:110]
        elif rng.random() < 0.5:
            prompt = stem[: rng.randint(1, 40)] + tail
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_hits_are_those_of_the_rule_whatever_is_drafted(seed: int) -> None:
    requests, model = texts(seed), TextModel()
    known = continuations(ToyModel(VOCAB), requests)
    wanted = []
    for request in requests:
        prompt = request.prompt_token_ids.tolist()
        wanted.append(model.run(prompt, known[request.request_id][: len(prompt) + request.max_tokens - 1]))
    for method in METHODS:
        bench = bench_for(requests, method, max_num_batched_tokens=17 + seed)
        assert hits_of(bench, requests) == wanted, method
        assert bench.engine.stats().num_prefix_lost_tokens == 0
    assert any(wanted)


@pytest.mark.parametrize("method", METHODS)
def test_the_next_turn_of_a_conversation_reuses_what_a_model_without_states_would(method: str) -> None:
    first = toy_request("first", range(2, 25), 30)
    answer = ToyModel(VOCAB).generate(first)
    second = toy_request("second", [*range(2, 25), *answer, 5, 6, 7], 30)
    again = toy_request("again", range(2, 25), 30)
    requests = [first, second, again]
    bench = bench_for(requests, method)
    assert hits_of(bench, requests) == [0, 52, 20]
    [turn] = [plan for plan in bench.plans if plan.request_ids == ("second",) and len(plan.new)]
    assert turn.states is not None
    assert turn.states.initial.item() >= 0
    assert all(
        plan.states is not None and plan.states.initial.item() == LIVE_STATE
        for plan in bench.plans
        if plan.request_ids == ("second",) and not plan.new
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_third_prompt_that_shares_a_prefix_reuses_all_of_it(method: str) -> None:
    requests = [toy_request(f"r{i}", [*range(2, 33), 50 + i, 60 + i, 70 + i], 3) for i in range(4)]
    # Blocks up to 28 are shared; the second finds the state at 16, and leaves one at 28.
    assert hits_of(bench_for(requests, method), requests) == [0, 16, 28, 28]


def test_long_prompts_get_few_snapshots() -> None:
    request = toy_request("a", [2 + i % 90 for i in range(601)], 1)
    bench = bench_for([request], max_num_batched_tokens=1000)
    hits_of(bench, [request])
    assert bench.engine.stats().num_used_state_snapshots == 5
    assert bench.plans[0].states is not None
    assert bench.plans[0].states.snapshot_ends.tolist() == [128, 256, 384, 512, 600]


@pytest.mark.parametrize("num_snapshots", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_few_snapshots_cost_hits_and_nothing_else(method: str, num_snapshots: int) -> None:
    requests = texts(3)
    bench = bench_for(requests, method, num_snapshots)
    bench.submit(*requests)
    transcript = bench.finish()
    for request in requests:
        assert transcript.token_ids[request.request_id] == ToyModel(VOCAB).generate(request)
    assert bench.executor.states is not None
    assert min(num_snapshots, 1) <= bench.executor.states.num_written
    assert bench.engine.stats().num_used_state_snapshots <= num_snapshots


def test_a_request_that_leaves_gives_its_unfinished_snapshots_back() -> None:
    requests = [toy_request("a", range(2, 40), 30), toy_request("b", range(2, 40), 30)]
    bench = bench_for(requests, max_num_batched_tokens=20)
    bench.submit(requests[0])
    bench.step()
    # Of 20 tokens the one at 16 is found from now on; no other place has been reached.
    assert bench.engine.stats().num_used_state_snapshots == 1
    bench.engine.abort(["a"])
    bench.engine.check_integrity()
    assert hits_of(bench, requests[1:]) == [16]


def test_nothing_of_a_request_that_failed_is_found() -> None:
    requests = [toy_request("a", range(2, 40), 30), toy_request("b", range(2, 40), 30)]
    bench = bench_for(requests)
    bench.executor._failures["a"] = 9
    assert hits_of(bench, requests) == [0, 0]


def test_a_request_that_must_compute_its_prompt_begins_without_a_state() -> None:
    requests = [toy_request(name, range(2, 40), 3) for name in "ab"]
    bench = bench_for(requests, enable_prefix_caching=False)
    assert hits_of(bench, requests) == [0, 0]
    assert bench.engine.stats().num_state_snapshots == 0
    begun = [plan.states.initial.item() for plan in bench.plans if plan.new and plan.states is not None]
    assert begun == [NO_STATE, NO_STATE]
