"""The draft policy learns how right its drafters are: always right or wrong, turning, never verified."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy_sd.cli.replay.recording import Conversation
from fastdeploy_sd.cli.replay.simulation import Replay
from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.control.cost import LinearCost
from fastdeploy_sd.spec_decode.control.proposer import AutoProposer
from fastdeploy_sd.spec_decode.methods.ngram import NgramProposer
from fastdeploy_sd.spec_decode.proposer import ProposerContext
from fastdeploy_sd.types.draft_methods import DraftSource
from tests.unit.spec_decode.policy_server import SOURCES, PolicyServer, i32, linear


@pytest.mark.parametrize("cost", [0.02, 0.1, 0.4])
def test_a_drafter_that_is_always_wrong_costs_little(cost: float) -> None:
    text = [1] * 350
    server = PolicyServer([text], [DraftSource.NGRAM])
    lengths = []
    while server.num_tokens[0] < 320:
        decision = server.decide([[([2] * 16, [0.5] * 16, (9, 9, 0))]], linear(cost, 64))
        lengths.append(len(decision.drafts.token_ids))
        server.commit(decision.drafts)
    assert sum(lengths) * cost < 3.0, "the drafts cost as much as three steps"
    assert sum(lengths[100:]) == 0


def test_a_drafter_that_is_always_right_is_used_at_once() -> None:
    text = list(range(1, 351))
    server = PolicyServer([text], [DraftSource.NGRAM])
    num_steps = 0
    while server.num_tokens[0] < 320:
        at = server.num_tokens[0]
        offer = (text[at : at + 16], [0.5] * 16, (3, 3, 0))
        server.commit(server.decide([[offer]], linear(0.1, 64)).drafts)
        num_steps += 1
    assert num_steps <= 30  # 21 with whole drafts from the first step on


@pytest.mark.parametrize(
    "offer_prob", [pytest.param(lambda right: 0.5, id="turns"), pytest.param(lambda right: 0.97, id="lies")]
)
def test_a_drafter_that_turns_from_right_to_wrong(offer_prob: Callable[[bool], float]) -> None:
    text = [1 + i % 7 for i in range(390)]
    server = PolicyServer([text], [DraftSource.NGRAM], 8)
    wasted, steps_wrong, last_drafts = 0, 0, -1
    while server.num_tokens[0] < 380:
        at = server.num_tokens[0]
        is_right = at < 200
        token_ids = text[at : at + 8] if is_right else [0] * 8
        offer = (token_ids, [offer_prob(is_right)] * len(token_ids), (9, 9, 0))
        decision = server.decide([[offer]], linear(0.2, 64))
        server.commit(decision.drafts)
        if not is_right:
            wasted += len(decision.drafts.token_ids)
            if len(decision.drafts.token_ids):
                last_drafts = steps_wrong
            steps_wrong += 1
    assert last_drafts < 100
    assert wasted * 0.2 < 10.0, "the turn cost as much as ten steps"


def test_learns_from_what_was_never_verified() -> None:
    # Too expensive at first: nothing is drafted. The offers are right all the same, and then they are worth it.
    text = list(range(1, 391))
    server = PolicyServer([text], [DraftSource.NGRAM], 8)
    decisions = []
    for _ in range(40):
        at = server.num_tokens[0]
        decisions.append(server.decide([[(text[at : at + 8], [0.5] * 8, (1, 1, 0))]], linear(0.75, 64)))
        server.commit(decisions[-1].drafts)
    assert len(decisions[0].drafts.token_ids) == 0
    assert len(decisions[-1].drafts.token_ids) > 0
    stats = server.controller.stats()[DraftSource.NGRAM]
    assert stats.num_scored > stats.num_wanted > 0
    assert 0 <= stats.squared_error / stats.num_scored < 0.25


def test_what_earlier_requests_showed_does_not_hide_what_the_next_ones_show() -> None:
    """Each copies its prompt but for some tokens of its own: which these are is known from its own text alone.

    After hundreds of requests every place that is kept for that has been another's, and what all of them have in common
    is known better.
    """
    rng, num_tokens, vocab = np.random.default_rng(0), 160, 1000

    def conversation(name: str) -> Conversation:
        prompt, is_changed = rng.integers(1, vocab, num_tokens), rng.random(vocab + 1) < 0.15
        answer = prompt.copy()
        answer[is_changed[prompt]] = rng.integers(vocab, 2 * vocab, int(is_changed[prompt].sum()))
        token_ids = np.concatenate([prompt, answer]).astype(np.int32)
        return Conversation(name, token_ids, ((num_tokens, 2 * num_tokens),))

    latest, others = ([conversation(f"{kind}{i}") for i in range(n)] for kind, n in (("latest", 12), ("other", 150)))
    context, cost = ProposerContext(1, 2 * num_tokens, 2 * vocab + 1), LinearCost(0.2)
    rates = []
    for before in ([], others):
        method = NgramProposer(SpeculativeConfig("ngram", 16), context)
        proposer = AutoProposer([(DraftSource.NGRAM, method)], cost, 1, 16)
        if before:
            Replay(proposer, 16).run(before)
            proposer.forget(i32([0]))
        counts = Replay(proposer, 16, step_time=lambda rows, *_: 0.8 + 0.2 * rows).run(latest)
        rates.append((counts.num_output_tokens - counts.num_responses) / counts.verify_time)
    assert rates[1] > 1.025 * rates[0]


def test_the_agreeing_source_of_two_is_trusted_more() -> None:
    server = PolicyServer([[1, 2, 3]], SOURCES[:2])
    same, other = ([5, 6], [0.5, 0.5], (3, 3, 0)), ([7, 8], [0.5, 0.5], (3, 3, 0))
    agree = server.decide([[same, same]], linear(0.0, 64)).num_tokens
    differ = server.decide([[same, other]], linear(0.0, 64)).num_tokens
    assert agree > differ > 1.0


def test_what_is_expected_of_chosen_drafts_comes_to_what_they_bring() -> None:
    # Eight rows are guessed at, and the best of the guesses chosen, though none can know which are right.
    rng = random.Random(4)
    server = PolicyServer([[rng.randrange(50) for _ in range(390)] for _ in range(8)], [DraftSource.NGRAM])
    expected, brought = [0.0, 0.0], [0, 0]
    for step in range(240):
        offers = []
        for text, n in zip(server.texts, server.num_tokens, strict=True):
            right = [t if rng.random() < 0.6 else 99 for t in text[n : n + 3]]
            offers.append([(right, [rng.random() for _ in right], (rng.randrange(40), rng.randrange(40), 0))])
        decision = server.decide(offers, linear(0.06, 64, 8))
        expected[step >= 60] += decision.num_tokens - 8
        brought[step >= 60] += server.commit(decision.drafts) - 8
        if max(server.num_tokens) > 370:
            server.controller.begin(i32(range(8)))
            server.num_tokens = [1] * 8
    assert brought[1] > 100
    assert brought[1] / expected[1] == pytest.approx(1.0, abs=0.03)
