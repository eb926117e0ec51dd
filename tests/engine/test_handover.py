"""Prompts computed by one engine and continued by another: the bytes of one engine, whatever happens in between."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from fastdeploy_sd.cli.verify import EngineVariant, compare, standard_methods
from fastdeploy_sd.cli.verify.methods import Method
from fastdeploy_sd.config import ModelConfig, SpeculativeConfig
from fastdeploy_sd.types import FinishReason, RequestMetrics
from tests.engine.handover_pairs import Pair, open_pair
from tests.engine.models import References

pytestmark = pytest.mark.slow

# Chunks of 16 tokens on the prefill instance, so that pages leave while the prompt is computed.
PREFILL = EngineVariant("prefill", max_num_seqs=6, long_prefill_token_threshold=16, enable_prefix_caching=True)
DECODE = EngineVariant("decode", max_num_seqs=9, enable_prefix_caching=True)
# Blocks for a few requests only.
TIGHT = 30


def method(name: str, num_drafts: int = 2) -> Method:
    drafting = SpeculativeConfig(model=str(ModelConfig("demo").path)) if name == "draft_model" else None
    [found] = standard_methods([name], [num_drafts], drafting, model_method="mtp")
    return found


def with_drafts(pair: Pair) -> int:
    """How many handed-over drafts were accepted."""
    counts = pair.decode.stats().drafts.get("handed_over")
    return 0 if counts is None else sum(counts.accepted)


@pytest.mark.parametrize(
    ("model", "decode", "prefill"),
    [
        ("demo", method("naive"), method("naive")),
        ("demo", method("ngram", 4), method("ngram", 1)),
        ("demo", method("suffix", 4), method("suffix", 4)),
        ("demo", method("mtp", 3), method("mtp", 1)),
        ("demo", method("mtp-ngram", 4), method("mtp", 2)),
        ("demo", method("mtp", 2), method("mtp-suffix", 4)),
        ("demo", method("mixed", 4), method("mtp", 2)),
        ("demo", method("suffix", 4), method("mtp", 2)),
        ("demo", method("ngram", 4), method("naive")),
        ("demo", method("naive"), method("mtp", 2)),
        ("demo", method("draft_model", 4), method("draft_model", 2)),
        ("demo", method("draft_model", 4), method("ngram", 2)),
        ("int8 KV", method("mtp"), method("mtp")),
        ("wint4", method("mtp"), method("mtp")),
        ("two MTP layers", method("mtp"), method("mtp")),
        *(
            ("qwen3_5-tiny", method(decode, 4), method(prefill, 2))
            for decode, prefill in (("naive", "naive"), ("ngram", "ngram"), ("auto-mtp", "mtp"), ("mtp", "mtp"))
        ),
        ("qwen3_next-tiny", method("mtp"), method("mtp")),
        *((model, method("mtp"), method("mtp")) for model in ("deepseek_v3-tiny", "glm4_moe-tiny", "gpt_oss-tiny")),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_two_engines_give_the_bytes_of_one(references: References, model: str, decode: Method, prefill: Method) -> None:
    reference, rng = references.get(model), random.Random(0)
    with open_pair(reference, (DECODE, decode), (PREFILL, prefill), seed=1) as pair:
        first = pair.run(decode.apply(reference.requests), rng)
        assert compare(reference.answers, first) is None
        stats, source = pair.decode.stats(), pair.prefill.stats()
        # What one instance knows of a common start is not sent, and what the other knows is not computed.
        assert min(stats.num_prefix_hits, source.num_prefix_hits, pair.wire.num_whole) > 3
        assert stats.num_supplied_tokens["prefill"] > 500
        assert pair.wire.num_failed == 0
        assert (with_drafts(pair) > 0) == decode.is_drafting
        if prefill.speculative.method == "draft_model":  # it does not run a prompt for the few drafts that would come
            assert len(stats.drafts["handed_over"].drafted) == 1  # the first token
        assert source.num_finished["error"] == source.num_finished["abort"] == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("demo", name) for name in ("naive", "suffix", "mtp", "mtp-ngram", "auto", "auto-mtp")),
        *(("qwen3_5-tiny", name) for name in ("naive", "ngram", "auto", "mtp")),
    ],
)
def test_nothing_that_goes_wrong_on_the_way_shows(references: References, model: str, name: str) -> None:
    """Transfers are lost, either side preempts and evicts, clients leave: those that stay get the same bytes."""
    reference, seen = references.get(model), Counter[str]()
    tight = [replace(way, num_blocks=TIGHT) for way in (DECODE, PREFILL)]
    for seed in range(4):
        rng, aborted = random.Random(seed), set[str]()
        with open_pair(reference, (tight[0], method(name)), (tight[1], method(name)), seed) as pair:
            got = pair.run(reference.requests, rng, each_turn=lambda: disturb(pair, rng, aborted))  # noqa: B023
            stayed = {i: answer for i, answer in reference.answers.items() if i not in aborted}
            assert compare(stayed, {i: answer for i, answer in got.items() if i not in aborted}) is None
            assert {pair.ended[i] for i in aborted} <= {FinishReason.ABORT}
            wire = pair.wire
            seen += Counter(
                stayed=len(stayed), lost=wire.num_failed, cancelled=wire.num_cancelled, whole=wire.num_whole,
                preempted=pair.decode.stats().num_preemptions,
            )  # fmt: skip
    assert len(seen) == 5
    assert min(seen.values()) > 3, seen


@pytest.mark.parametrize("num_snapshots", [1, 2])
def test_a_state_without_a_place_is_computed(references: References, num_snapshots: int) -> None:
    reference, rng = references.get("qwen3_5-tiny"), random.Random(0)
    few = replace(reference.base, cache=replace(reference.base.cache, num_state_snapshots=num_snapshots))
    with open_pair(replace(reference, base=few), (DECODE, method("mtp")), (PREFILL, method("mtp")), seed=1) as pair:
        assert compare(reference.answers, pair.run(reference.requests, rng)) is None
        assert pair.decode.stats().num_state_snapshots == num_snapshots
        assert pair.wire.num_whole > 0
        assert pair.wire.num_begun < len(reference.requests)


def disturb(pair: Pair, rng: random.Random, aborted: set[str]) -> None:
    """Lose a transfer; end a request that runs, or one that waits for its KV."""
    if pair.wire.waiting and rng.random() < 0.1:
        pair.wire.lose(rng.choice(pair.wire.waiting))
    pool = pair.decode._pool
    for candidates in (list(pool.states), list(pool.admitted)):
        if candidates and rng.random() < 0.05:
            request_id = rng.choice(candidates)
            pair.abort(request_id)
            aborted.add(request_id)


def test_a_draining_prefill_instance_finishes_what_it_took_and_refuses_the_rest(references: References) -> None:
    reference, rng = references.get("demo"), random.Random(0)
    with open_pair(reference, (DECODE, method("mtp")), (PREFILL, method("mtp")), seed=2) as pair:

        def drain() -> None:
            if pair.wire.num_begun >= 3:
                pair.prefill.drain()

        assert compare(reference.answers, pair.run(reference.requests, rng, each_turn=drain)) is None
        assert min(pair.wire.num_whole, pair.wire.num_failed) >= 3


def test_a_prefill_instance_tells_of_prompts_that_are_in_a_trace(references: References) -> None:
    reference, told = references.get("demo"), list[tuple[str, RequestMetrics, int, int]]()
    with open_pair(reference, (DECODE, method("mtp")), (PREFILL, method("mtp")), seed=2) as pair:
        pair.prefill.trace = lambda *one: told.append(one)
        long = [request for request in reference.requests if len(request.prompt_token_ids) > 2 * DECODE.block_size]
        traced = {request.request_id: replace(request, trace_context=request.request_id) for request in long[::2]}
        pair.run([traced.get(request.request_id, request) for request in long], random.Random(0))
    assert 2 < len(told) <= len(traced)
    for context, metrics, num_tokens, num_cached in told:
        assert num_cached < num_tokens == len(traced[context].prompt_token_ids)
        assert 0 < metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time


def test_orders_that_are_given_up_at_the_end_hold_nothing(references: References) -> None:
    reference, rng = references.get("demo"), random.Random(0)
    with open_pair(reference, (DECODE, method("naive")), (PREFILL, method("naive")), seed=3) as pair:

        def end() -> None:
            exports = pair.prefill._exports.values()
            if exports and rng.random() < 0.5 and not any(export.is_over for export in exports):
                pair.prefill.end()
                pair.prefill.check_integrity()
                stats = pair.prefill.stats()
                assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
                assert not pair.prefill.has_work()

        assert compare(reference.answers, pair.run(reference.requests, rng, each_turn=end)) is None
        assert pair.wire.num_failed > 3


def test_a_storm_of_aborts_leaves_no_block_and_no_order(references: References) -> None:
    """Clients leave as soon as they have come, whether their KV is ordered, on its way or there."""
    reference, rng = references.get("demo"), random.Random(1)
    with open_pair(reference, (DECODE, method("mtp")), (PREFILL, method("mtp")), seed=4) as pair:
        storm = [replace(r, request_id=f"{r.request_id}-{i}") for i in range(12) for r in reference.requests]

        def abort() -> None:
            for request_id in list(pair.decode._pool.states):
                if "-" in request_id and rng.random() < 0.6:
                    pair.abort(request_id)

        pair.run(storm, rng, arrivals_per_turn=20, each_turn=abort)
        assert pair.wire.num_cancelled > 30
        assert compare(reference.answers, pair.run(reference.requests, rng)) is None
