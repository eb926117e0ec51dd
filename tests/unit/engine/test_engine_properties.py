"""The promise, over random schedules: a request's tokens never depend on how they were computed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import pytest

from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.kv_connector import SWAP
from fastdeploy_sd.engine.kvcache import state_cache
from fastdeploy_sd.engine.stats_recorder import DraftCounter
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.proposer import Proposer
from fastdeploy_sd.types import DraftSource, FinishReason, Request, RequestOutput, SchedulerOutput, Speculation
from fastdeploy_sd.types.kv_groups import KvGroup, most_tokens
from fastdeploy_sd.types.stats import SourceCounts
from tests.doubles.bench import continuations
from tests.doubles.connectors import ToyConnector
from tests.doubles.engines import Transcript, run_to_end, toy_config, toy_info, toy_request
from tests.doubles.proposers import OracleProposer, RandomLengthProposer, WrongProposer
from tests.doubles.toy_adapters import ToyAdapters, adapter_of, with_adapters
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_launcher import ToyLauncher
from tests.doubles.toy_logprobs import toy_logprob
from tests.doubles.toy_model import ToyModel
from tests.doubles.toy_store import ToyStore

pytestmark = pytest.mark.slow

VOCAB = 97
ADAPTERS = ("x", "y", "z")
PROPOSERS = ("none", "oracle", "wrong", "random")


@dataclass
class Scenario:
    """One random engine and the requests for it; everything follows from the seed.

    Attributes:
        known: prompt and continuation by request. plans: of the steps so far. connector: of KV.
    """

    engine: Engine
    executor: ToyExecutor
    model: ToyModel
    requests: list[Request]
    known: dict[str, list[int]]
    failing: dict[str, int]
    plans: list[SchedulerOutput]
    connector: ToyConnector

    @property
    def finished(self) -> list[SchedulerOutput]:
        """The plans whose results the engine has."""
        launcher = self.executor.launcher
        return launcher.finished if isinstance(launcher, ToyLauncher) else self.plans


def build_scenario(
    seed: int,
    proposer_name: str,
    connector_rate: float = 0.0,
    *,
    has_store: bool = False,
    launches: bool = False,
    drafts_async: bool = False,
    has_windows: bool = False,
    has_states: bool = False,
) -> Scenario:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = rng.randint(max(2, 40 // block_size), 100 // block_size)
    model = ToyModel(VOCAB, eos_rate=rng.choice([0.0, 0.05, 0.3]))
    chunked = rng.random() < 0.7
    budget = rng.randint(1, 24) if chunked else rng.randint(24, 40)
    max_num_seqs = rng.randint(1, 6)
    max_draft_tokens = min(rng.choice([1, 3, 7]), max(budget // max_num_seqs, budget // 2, 1) - 1)
    num_lookahead_slots = rng.choice([0, 1, max_draft_tokens]) if max_draft_tokens else 0
    if launches and not drafts_async and seed % 4 > 1:
        max_draft_tokens = num_lookahead_slots = 0
    groups = _groups(rng, block_size, budget) if has_windows else ()
    max_request_tokens = most_tokens(groups, num_blocks) if groups else num_blocks * block_size
    requests = _requests(rng, min(40, max_request_tokens), max_draft_tokens)
    if launches and seed % 4:
        requests = [_without_rules(r) if rng.random() < 0.9 else r for r in requests]
    adapters = random.Random(seed * 7 + 1)
    num_slots = adapters.choice([0, 0, 1, 2])
    if num_slots:
        names = ["", "", "", *ADAPTERS]
        requests = [replace(r, adapter=adapter_of(n) if (n := adapters.choice(names)) else None) for r in requests]
    if has_store:  # prompts come again when their blocks are long gone
        requests += [replace(r, request_id=f"{r.request_id} again") for r in requests]
    threshold = rng.choice([0, 1, 5, 12]) if chunked else 0
    failing = {request.request_id: rng.randint(0, 3) for request in requests if rng.random() < 0.05}
    known, plans = continuations(model, requests), list[SchedulerOutput]()

    def before_step(plan: SchedulerOutput) -> None:
        num_committed = plan.num_new_tokens - np.diff(plan.draft.cu_num_draft)
        assert threshold == 0 or num_committed.max() <= threshold, "a chunk above the threshold"
        plans.append(plan)

    executor = ToyExecutor(
        toy_info(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=VOCAB,
            max_draft_tokens=max_draft_tokens,
            num_lookahead_slots=num_lookahead_slots,
            kv_groups=groups,
            num_state_snapshots=rng.choice([0, 1, 3, 9, 60]) if has_states else None,
            num_adapter_slots=num_slots,
        ),
        _proposer(proposer_name, known, seed),
        model=model,
        failures=failing,
        before_step=before_step,
        rests=(lambda: rng.choice([0, 0, 1, 5])) if launches and not drafts_async else None,
    )
    executor.adapters = ToyAdapters(delay=lambda: adapters.choice([0, 0, 1, 5]))
    if launches:
        executor.launcher = ToyLauncher(executor, seed, drafts_async=drafts_async)
    executor.step_ms = lambda plan: 0.5 + 0.1 * int(plan.num_new_tokens.sum())
    config = toy_config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=rng.random() < 0.8,
        policy=rng.choice(["fair", "fcfs", "priority"]),
        max_step_ms=rng.choice([0.0, 0.5, 3.0]),
        long_prefill_token_threshold=threshold,
    )
    config = with_adapters(config, *ADAPTERS)
    connector = ToyConnector(seed, connector_rate)
    connector.executor = executor
    if has_store:
        damage_rate, failure_rate = rng.choice([0.0, 0.3]), rng.choice([0.0, 0.1])
        executor.block_store = ToyStore(
            executor, rng.randint(1, 3 * num_blocks), seed, damage_rate=damage_rate, failure_rate=failure_rate
        )
    engine = Engine(config, executor, None if has_windows or has_states else connector)
    return Scenario(engine, executor, model, requests, known, failing, plans, connector)


def _groups(rng: random.Random, block_size: int, max_step_tokens: int) -> tuple[KvGroup, ...]:
    """Layers of full attention, and up to three kinds of windows; blocks of a group may hold more tokens."""
    windows = [
        KvGroup(block_size * rng.choice([1, 1, 2]), rng.randint(1, 20), max_step_tokens)
        for _ in range(rng.randint(1, 3))
    ]
    return (KvGroup(block_size), *windows)


def _requests(rng: random.Random, max_total: int, max_draft_tokens: int) -> list[Request]:
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
        speculation = Speculation(
            enabled=rng.random() < 0.85,
            method=rng.choice([None, None, "ngram", "naive"]),
            num_speculative_tokens=rng.choice([None, None, 1, 2]),
            num_draft_logprobs=rng.choice([None, 0, 2]),
        )
        if max_draft_tokens == 0:
            speculation = Speculation()  # all that such a server takes
        elif speculation.num_speculative_tokens is not None:
            speculation = replace(
                speculation, num_speculative_tokens=min(speculation.num_speculative_tokens, max_draft_tokens)
            )
        salt = rng.choice(["", "", "tenant"])
        requests.append(
            toy_request(
                f"r{i}",
                prompt,
                max_tokens,
                priority=rng.randint(-1, 1),
                client=rng.choice(["", "a", "b"]),
                cache_salt=salt,
                sampling=sampling,
                speculation=speculation,
            )
        )
    return requests


def _without_rules(request: Request) -> Request:
    """The request, so that a step of it may be started behind one that is not over."""
    speculation = replace(request.speculation, num_draft_logprobs=None)
    return replace(request, sampling=replace(request.sampling, logprobs=None, min_tokens=0), speculation=speculation)


def _proposer(name: str, known: dict[str, list[int]], seed: int) -> Proposer | None:
    if name == "none":
        return None
    if name == "random":
        return RandomLengthProposer(known, VOCAB, seed)
    return (OracleProposer if name == "oracle" else WrongProposer)(known, VOCAB)


class Recount:
    """What verifications must have come to, from the plans and the known continuations alone."""

    def __init__(self, scenario: Scenario) -> None:
        self.by_request = {request.request_id: DraftCounter() for request in scenario.requests}
        self.by_source: Counter[tuple[str, int, str]] = Counter()
        self._scenario = scenario
        self._requests = {request.request_id: request for request in scenario.requests}

    def add(self, plan: SchedulerOutput, outputs: list[RequestOutput], transcript: Transcript) -> None:
        """Count a step and check what it reported; `transcript` does not have its outputs yet."""
        rows = {request_id: row for row, request_id in enumerate(plan.request_ids)}
        for output in outputs:
            name, row = output.request_id, rows[output.request_id]
            request, drafts = self._requests[name], plan.draft.row(row).tolist()
            if output.finish_reason is FinishReason.ERROR:
                drafts = []
            begin = len(request.prompt_token_ids) + len(transcript.token_ids.get(name, ()))
            right = self._scenario.known[name][begin : begin + len(drafts)]
            num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, right, strict=True)))
            num_accepted = min(num_right, len(output.token_ids))
            # What lies behind the end of a request counts nowhere.
            num_counted = len(drafts) if output.finish_reason is None else min(len(drafts), len(output.token_ids))
            first = plan.draft.cu_num_draft[row]
            sources = [] if plan.draft.sources is None else plan.draft.sources[first:].tolist()
            if drafts:
                self.by_request[name].add(bytes(sources[:num_counted]), num_accepted, len(output.token_ids))
            for i, source in enumerate(sources[:num_counted]):
                for fate, counts in (("drafted", True), ("reached", i <= num_accepted), ("accepted", i < num_accepted)):
                    self.by_source[DraftSource(source).name.lower(), i, fate] += counts
            self._check_logprobs(output, drafts, sources, num_accepted)

    def _check_logprobs(self, output: RequestOutput, drafts: list[int], sources: list[int], num_accepted: int) -> None:
        count = self._requests[output.request_id].speculation.num_draft_logprobs
        if count is None:
            assert output.draft_logprobs is None
            return
        assert output.draft_logprobs is not None
        reported = [(d.draft.token_id, d.draft.logprob, d.position, d.accepted) for d in output.draft_logprobs]
        verified = zip(drafts, sources[: len(drafts)], strict=True)
        assert reported == [
            (token_id, toy_logprob(token_id), i, i < num_accepted)
            for i, (token_id, source) in enumerate(verified)
            if source == DraftSource.MTP
        ]
        assert all(len(d.draft.top_token_ids) == count for d in output.draft_logprobs)

    def check(self, transcript: Transcript) -> None:
        """Compare with what the engine says, per request, per method and per source."""
        stats, by_method = self._scenario.engine.stats(), dict[str, DraftCounter]()
        for name, counter in self.by_request.items():
            metrics = transcript.last[name].metrics
            assert metrics is not None
            assert metrics.drafts == counter.counts()
            assert metrics.accepted_by_source == counter.accepted_by_source()
            assert sum(metrics.accepted_by_source.values()) == sum(metrics.drafts.accepted)
            method = self._scenario.executor.model_info.speculation.method_of(self._requests[name].speculation)
            by_method.setdefault(method, DraftCounter()).merge(counter)
        counts = {method: counter.counts() for method, counter in by_method.items()}
        assert stats.verifications == {method: c for method, c in counts.items() if c.num_verifications}
        found = {
            (source, i, fate): count
            for source, c in stats.drafts.items()
            for fate in ("drafted", "reached", "accepted")
            for i, count in enumerate(getattr(c, fate))
        }
        assert {key: n for key, n in found.items() if n} == {key: n for key, n in self.by_source.items() if n}


def drive(scenario: Scenario, rng: random.Random, abort_rate: float) -> tuple[Transcript, set[str]]:
    """Submit at random moments, abort at random moments, step until all is over."""
    engine, transcript, aborted, recount = scenario.engine, Transcript(), set[str](), Recount(scenario)
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
        waiting, num_plans, num_finished = scenario.connector.waiting, len(scenario.plans), len(scenario.finished)
        assert engine.stats().num_waiting_for_kv >= len(waiting)
        adapters = scenario.executor.adapters
        assert isinstance(adapters, ToyAdapters)
        is_due = not engine.is_stalled or scenario.executor.block_store is not None or bool(adapters.begun)
        if waiting and rng.random() < 0.3:
            scenario.connector.finish(rng.choice(waiting))
            is_due = True
        outputs = engine.step()
        assert is_due or len(scenario.plans) == num_plans, "a stalled engine ran something"
        running = set(scenario.plans[-1].request_ids) if len(scenario.plans) > num_plans else set()
        assert running.isdisjoint(scenario.connector.waiting), "a request ran whose KV had not arrived"
        if outputs:
            recount.add(scenario.finished[num_finished], outputs, transcript)
        transcript.add(outputs)
        engine.check_integrity()
    recount.check(transcript)
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
    preemptions = hits = accepted = rejected = failures = short_of_slots = extended = 0
    for seed in range(60):
        scenario = build_scenario(seed, "random")
        drive(scenario, random.Random(seed + 1), abort_rate=0.05)
        stats = scenario.engine.stats()
        preemptions += stats.num_preemptions
        hits += stats.num_prefix_hits
        accepted += stats.num_accepted_tokens
        rejected += stats.num_draft_tokens - stats.num_accepted_tokens
        failures += stats.num_finished["error"]
        short_of_slots += scenario.executor.draft_layers.num_cut_drafts
        extended += sum(stats.drafts["ngram"].drafted) if "ngram" in stats.drafts else 0
    assert min(preemptions, hits, accepted, rejected, failures, short_of_slots, extended) >= 10


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_requests_with_kv_from_elsewhere_get_the_plain_tokens(proposer: str) -> None:
    """All, some or none of it comes, with drafts of any quality; meanwhile requests lose their blocks, or end."""
    seen = Counter[str]()
    for seed in range(60):
        scenario = build_scenario(seed, proposer, connector_rate=0.5)
        rng = random.Random(seed + 1)
        transcript, aborted = drive(scenario, rng, abort_rate=rng.choice([0.0, 0.1]))
        check_outcome(scenario, transcript, aborted)
        stats, connector = scenario.engine.stats(), scenario.connector
        assert (stats.num_kv_cancels, stats.num_waiting_for_kv, connector.waiting) == (connector.num_cancelled, 0, [])
        assert stats.num_kv_arrivals + stats.num_kv_cancels == connector.num_begun
        handed_over = stats.drafts.get("handed_over", SourceCounts())
        metrics = [transcript.last[name].metrics for name in aborted]
        seen += Counter(
            failed=connector.num_failed, whole=connector.num_whole, cancelled=connector.num_cancelled,
            preempted=stats.num_preemptions, supplied=stats.num_supplied_tokens.get("elsewhere", 0),
            aborted_early=sum(m is not None and not m.first_scheduled_time for m in metrics),
            verified=sum(handed_over.drafted), accepted=sum(handed_over.accepted),
        )  # fmt: skip
    assert len(seen) == 8
    assert min(seen.values()) >= 5, seen


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_second_level_of_the_prefix_cache_changes_no_token(proposer: str) -> None:
    """Copies come late, are cancelled, damaged or refused; prompts may also come from elsewhere behind them."""
    seen = Counter[str]()
    for seed in range(40):
        scenario = build_scenario(seed, proposer, connector_rate=0.3 if seed % 2 else 0.0, has_store=True)
        store, rng = scenario.executor.block_store, random.Random(seed + 1)
        assert isinstance(store, ToyStore)
        transcript, aborted = drive(scenario, rng, abort_rate=rng.choice([0.0, 0.1]))
        check_outcome(scenario, transcript, aborted)
        store.is_prompt = True
        scenario.engine.step()
        scenario.engine.check_integrity()
        stats, swap = scenario.engine.stats(), scenario.engine.stats().swap
        assert swap.num_begun_stores + swap.num_begun_loads == sum(
            (swap.num_stored, swap.num_loaded, swap.num_lost, swap.num_withdrawn, swap.num_damaged, swap.num_failed)
        )
        assert (swap.num_damaged, swap.num_failed) == (store.num_damaged, store.num_failed)
        assert stats.num_prefix_swap_hit_tokens <= stats.num_supplied_tokens.get(SWAP, 0)
        seen += Counter(
            stored=swap.num_stored, loaded=swap.num_loaded, lost=swap.num_lost, withdrawn=swap.num_withdrawn,
            evicted=swap.num_evicted, damaged=swap.num_damaged, failed=swap.num_failed, hits=swap.num_hits,
            preempted=stats.num_preemptions, arrived=stats.num_supplied_tokens.get(SWAP, 0),
            both=stats.num_supplied_tokens.get("elsewhere", 0),
        )  # fmt: skip
    assert min(seen[name] for name in seen) >= 5, seen
    assert len(seen) == 11


@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_layers_with_windows_read_what_they_need(proposer: str, *, launches: bool) -> None:
    """Blocks before a window go to other requests; preemption, drafts that are taken back and prefix hits all occur."""
    seen = Counter[str]()
    for seed in range(40):
        scenario = build_scenario(seed, proposer, has_windows=True, launches=launches)
        rng = random.Random(seed + 1)
        transcript, aborted = drive(scenario, rng, abort_rate=rng.choice([0.0, 0.1]))
        check_outcome(scenario, transcript, aborted)
        stats, groups = scenario.engine.stats(), scenario.executor.model_info.groups
        lengths = [len(r.prompt_token_ids) + len(transcript.token_ids[r.request_id]) for r in scenario.requests]
        seen += Counter(
            preempted=stats.num_preemptions, hits=stats.num_prefix_hits, accepted=stats.num_accepted_tokens,
            rejected=stats.num_draft_tokens - stats.num_accepted_tokens,
            left_behind=sum(g.first_block(length) > 0 for g in groups for length in lengths),
        )  # fmt: skip
    if proposer in ("none", "wrong"):
        del seen["accepted"]
    if proposer in ("none", "oracle"):
        del seen["rejected"]
    assert len(seen) == {"none": 3, "random": 5}.get(proposer, 4)
    assert min(seen.values()) >= 5, seen


@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_recurrent_states_begin_where_requests_do(
    proposer: str, monkeypatch: pytest.MonkeyPatch, *, launches: bool
) -> None:
    """The toy executor verifies each row's state, with few snapshots or many, preemption, aborts, rejected drafts."""
    monkeypatch.setattr(state_cache, "_INTERVAL", 5)
    monkeypatch.setattr(state_cache, "_MOST_INTERVALS", 2)
    seen = Counter[str]()
    for seed in range(40):
        scenario = build_scenario(seed, proposer, has_states=True, launches=launches)
        rng, states = random.Random(seed + 1), scenario.executor.states
        assert states is not None
        transcript, aborted = drive(scenario, rng, abort_rate=rng.choice([0.0, 0.1]))
        check_outcome(scenario, transcript, aborted)
        stats = scenario.engine.stats()
        assert stats.num_used_state_snapshots <= stats.num_state_snapshots
        seen += Counter(
            preempted=stats.num_preemptions, hits=stats.num_prefix_hits, accepted=stats.num_accepted_tokens,
            rejected=stats.num_draft_tokens - stats.num_accepted_tokens, taken=states.num_taken,
            written=states.num_written, full=stats.num_used_state_snapshots == stats.num_state_snapshots > 0,
        )  # fmt: skip
    if proposer in ("none", "wrong"):
        del seen["accepted"]
    if proposer in ("none", "oracle"):
        del seen["rejected"]
    assert min(seen.values()) >= 5, seen


def test_the_executor_forgets_every_request() -> None:
    """The worker's state of ended requests goes with the next step."""
    scenario = build_scenario(3, "none")
    drive(scenario, random.Random(0), abort_rate=0.1)
    scenario.engine.submit(toy_request("last", [5, 6], 1))
    run_to_end(scenario.engine)
    assert scenario.executor.known_request_ids == {"last"}
