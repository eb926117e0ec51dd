"""The promise, over random schedules: a request's tokens never depend on how they were computed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.proposer import Proposer
from fastdeploy_sd.types import FinishReason, Request
from tests.doubles.engines import Transcript, run_to_end, toy_config, toy_info, toy_request
from tests.doubles.proposers import OracleProposer, RandomLengthProposer, WrongProposer
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_model import ToyModel

VOCAB = 97
PROPOSERS = ("none", "oracle", "wrong", "random")


@dataclass
class Scenario:
    """One random engine and the requests for it; everything follows from the seed."""

    engine: Engine
    executor: ToyExecutor
    model: ToyModel
    requests: list[Request]
    failing: dict[str, int]


def build_scenario(seed: int, proposer_name: str) -> Scenario:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = rng.randint(max(2, 40 // block_size), 100 // block_size)
    model = ToyModel(VOCAB, eos_rate=rng.choice([0.0, 0.05, 0.3]))
    chunked = rng.random() < 0.7
    budget = rng.randint(1, 24) if chunked else rng.randint(24, 40)
    requests = _requests(rng, min(40, num_blocks * block_size))
    failing = {request.request_id: rng.randint(0, 3) for request in requests if rng.random() < 0.05}
    num_drafts = rng.choice([1, 3, 7])
    executor = ToyExecutor(
        toy_info(num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB),
        _proposer(proposer_name, model, requests, seed),
        model=model,
        failures=failing,
    )
    config = toy_config(
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=rng.random() < 0.8,
        policy=rng.choice(["fcfs", "priority"]),
        num_speculative_tokens=num_drafts,
    )
    return Scenario(Engine(config, executor), executor, model, requests, failing)


def _requests(rng: random.Random, max_total: int) -> list[Request]:
    """Prompts that share prefixes, some sampled, some with stop tokens or min_tokens."""
    stems = [[rng.randrange(2, VOCAB) for _ in range(20)] for _ in range(3)]
    requests = []
    for i in range(rng.randint(1, 14)):
        prompt = rng.choice(stems)[: rng.randint(1, 20)] + [rng.randrange(2, VOCAB) for _ in range(rng.randint(0, 4))]
        prompt = prompt[: max_total - 1]
        max_tokens = rng.randint(1, max_total - len(prompt))
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 5]))),
            min_tokens=min(max_tokens, rng.choice([0, 0, 6])),
            ignore_eos=rng.random() < 0.2,
            logprobs=rng.choice([None, None, 0, 2]),
        )
        salt = rng.choice(["", "", "tenant"])
        requests.append(
            toy_request(f"r{i}", prompt, max_tokens, priority=rng.randint(-1, 1), cache_salt=salt, sampling=sampling)
        )
    return requests


def _proposer(name: str, model: ToyModel, requests: list[Request], seed: int) -> Proposer | None:
    continuations = {}
    for request in requests:
        endless = model.endless(request)
        tail = [next(endless) for _ in range(request.max_tokens + 20)]
        continuations[request.request_id] = [*request.prompt_token_ids.tolist(), *tail]
    if name == "none":
        return None
    if name == "random":
        return RandomLengthProposer(continuations, VOCAB, seed)
    return (OracleProposer if name == "oracle" else WrongProposer)(continuations, VOCAB)


def drive(scenario: Scenario, rng: random.Random, abort_rate: float) -> tuple[Transcript, set[str]]:
    """Submit at random moments, abort at random moments, step until all is over."""
    engine, transcript, aborted = scenario.engine, Transcript(), set[str]()
    todo = list(reversed(scenario.requests))
    submitted: list[str] = []
    while todo or engine.has_work():
        while todo and (rng.random() < 0.4 or not engine.has_work()):
            request = todo.pop()
            engine.submit(request)
            submitted.append(request.request_id)
        if rng.random() < abort_rate:
            request_id = rng.choice(submitted)
            outputs = engine.abort([request_id, "unknown"])
            transcript.add(outputs)
            aborted |= {output.request_id for output in outputs}
            engine.check_integrity()
        transcript.add(engine.step())
        engine.check_integrity()
    return transcript, aborted


def check_outcome(scenario: Scenario, transcript: Transcript, aborted: set[str]) -> None:
    """Every request ended once, with the plain continuation (or the part of it it got to)."""
    assert set(transcript.last) == {request.request_id for request in scenario.requests}
    for request in scenario.requests:
        name, expected = request.request_id, scenario.model.generate(request)
        got, last = transcript.token_ids[name], transcript.last[name]
        assert last.metrics is not None
        if last.finish_reason is FinishReason.ABORT:
            assert name in aborted
            assert got == expected[: len(got)]
        elif last.finish_reason is FinishReason.ERROR:
            assert last.error == ("InternalError", "non-finite logits")
            assert len(got) >= scenario.failing[name]
            assert got == expected[: len(got)]
        else:
            assert got == expected
            ends = set(request.eos_token_ids) if not request.sampling.ignore_eos else set()
            if last.finish_reason is FinishReason.STOP and got[-1] not in ends:
                assert last.stop_reason == got[-1]
            else:
                assert last.stop_reason is None
    stats = scenario.engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
    assert stats.num_requests == sum(stats.num_finished.values()) == len(scenario.requests)
    assert stats.num_generated_tokens == sum(len(tokens) for tokens in transcript.token_ids.values())
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert sum(stats.drafted_per_position) == stats.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_any_schedule_gives_the_plain_tokens(first_seed: int, proposer: str) -> None:
    for seed in range(first_seed, first_seed + 25):
        scenario = build_scenario(seed, proposer)
        rng = random.Random(seed + 1)
        transcript, aborted = drive(scenario, rng, abort_rate=rng.choice([0.0, 0.1]))
        check_outcome(scenario, transcript, aborted)


def test_the_scenarios_reach_the_rare_paths() -> None:
    """Without preemption, prefix hits, cut drafts and failures the test above would prove nothing."""
    preemptions = hits = accepted = rejected = failures = 0
    for seed in range(60):
        scenario = build_scenario(seed, "random")
        drive(scenario, random.Random(seed + 1), abort_rate=0.05)
        stats = scenario.engine.stats()
        preemptions += stats.num_preemptions
        hits += stats.num_prefix_hits
        accepted += stats.num_accepted_tokens
        rejected += stats.num_draft_tokens - stats.num_accepted_tokens
        failures += stats.num_finished["error"]
    assert min(preemptions, hits, accepted, rejected, failures) >= 10


def test_the_executor_forgets_every_request() -> None:
    """The worker's state of ended requests goes with the next step."""
    scenario = build_scenario(3, "none")
    drive(scenario, random.Random(0), abort_rate=0.1)
    scenario.engine.submit(toy_request("last", [5, 6], 1))
    run_to_end(scenario.engine)
    assert scenario.executor.known_request_ids == {"last"}
