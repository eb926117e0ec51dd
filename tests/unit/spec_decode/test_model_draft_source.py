"""A source that runs a model: asked where its drafts are worth the call, left alone where not, and tried again."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.control import model_draft_source
from fastdeploy_sd.spec_decode.control.cost import DraftCost, LinearCost
from fastdeploy_sd.spec_decode.control.model_draft_source import ModelDraftSource, Trials
from fastdeploy_sd.spec_decode.control.profile import DraftSample
from fastdeploy_sd.spec_decode.control.proposer import AutoProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer, TargetStep
from fastdeploy_sd.types import DraftSource, DraftTokens, offsets

NUM_SEQS, MAX_LEN, BLOCK_SIZE, STEPS, PROMPT = 4, 1 << 15, 16, 3, 8


class Layers(Proposer):
    """Draft layers that are right or wrong as told, with what they were asked for."""

    def __init__(self) -> None:
        self.is_right, self.prob = True, 0.9
        self.num_asked: list[list[int]] = []
        self.num_calls = 0

    @property
    def num_lookahead_slots(self) -> int:
        return STEPS

    def propose(self, x: ProposeInput) -> DraftTokens:
        self.num_calls += 1
        self.num_asked.append(x.max_draft_len.tolist())
        rows = [
            [(n + i) % 997 if self.is_right else 998 for i in range(k)]
            for n, k in zip(x.num_tokens.tolist(), x.max_draft_len.tolist(), strict=True)
        ]
        assert x.probabilities is not None
        x.probabilities.draft_prob[: sum(map(len, rows))] = self.prob
        token_ids = np.array([token_id for row in rows for token_id in row], np.int32)
        return DraftTokens(token_ids, offsets([len(row) for row in rows]))


class Steps:
    """Requests whose token i is i % 997, drafted for by these layers alone."""

    def __init__(self, num_rows: int = 1, call_ms: float = 0.2, *, fills_late: bool = False) -> None:
        self.layers = Layers()
        self.source = ModelDraftSource(self.layers, NUM_SEQS, BLOCK_SIZE, fills_late=fills_late)
        self.source.cost.take([DraftSample("mtp", n, k, 8, call_ms * (1 + 0.2 * k)) for n in (1, 4) for k in (1, 3)])
        self.auto = AutoProposer([], LinearCost(0.05), NUM_SEQS, 8, DraftSource.MTP)
        requests = [DraftRequest(f"r{r}", r, PROMPT, PROMPT) for r in range(num_rows)]
        self.source.begin(requests)
        self.auto.begin(requests)
        self.table = np.tile(np.arange(MAX_LEN, dtype=np.int32) % 997, (NUM_SEQS, 1))
        self.num_tokens = [PROMPT + 1] * num_rows
        self.num_computed = [0] * num_rows
        self.num_wanted: list[int] = []

    def step(self, count: int = 1) -> None:
        """Run steps in which right drafts are accepted."""
        for _ in range(count):
            x = self.input()
            if self.source.is_backing_off():
                drafts = self.auto.decide(x).drafts
                self.num_wanted.append(0)
                self.source.keep_up(x)
            else:
                wanted, least = self.auto.ask(x, self.source, 1.0)
                self.num_wanted.append(int(wanted.sum()))
                if wanted.any():
                    found = self.source.draft(x, wanted, np.full(len(wanted), least, np.float32))
                else:
                    self.source.keep_up(x)
                    found = DraftTokens.none(len(wanted)), np.zeros(0, np.float32)
                drafts = self.auto.choose(x, *found).drafts
            for r, num_drafts in enumerate(np.diff(drafts.cu_num_draft).tolist()):
                self.num_computed[r] = self.num_tokens[r] - 1
                self.num_tokens[r] += 1 + (num_drafts if self.layers.is_right else 0)

    def input(self) -> ProposeInput:
        rows, num_tokens = np.arange(len(self.num_tokens), dtype=np.int32), np.array(self.num_tokens, np.int32)
        computed = np.array(self.num_computed, np.int32)
        target = TargetStep(offsets(num_tokens - computed), computed, num_tokens - 1, np.full_like(rows, MAX_LEN))
        ids = tuple(f"r{r}" for r in rows)
        return ProposeInput(ids, rows, self.table, num_tokens, np.full_like(rows, 8), target=target)


def test_it_is_asked_while_it_is_right_and_all_its_drafts_are_taken() -> None:
    steps = Steps(2)
    steps.step(40)
    assert set(steps.num_wanted[10:]) == {2 * STEPS}
    assert min(steps.num_tokens) > PROMPT + 30 * (1 + STEPS)


def test_it_is_left_alone_once_it_is_wrong_and_tried_more_and_more_rarely() -> None:
    steps = Steps()
    steps.step(30)
    steps.layers.is_right = False
    steps.step(40)
    del steps.num_wanted[:]
    steps.step(2000)
    asked = np.flatnonzero(steps.num_wanted)
    assert 4 < len(asked) < 40
    pauses = np.diff(asked)
    assert pauses[pauses > 20].tolist() == sorted(pauses[pauses > 20].tolist())
    steps.layers.is_right = True
    steps.step(5000)
    assert set(steps.num_wanted[-100:]) == {STEPS}


def test_a_call_that_takes_longer_than_what_it_brings_is_not_made() -> None:
    steps = Steps(call_ms=4.0)
    steps.step(60)
    assert not any(steps.num_wanted)


def test_kv_is_filled_along_prompts_and_where_a_block_is_full_and_not_otherwise() -> None:
    steps = Steps(call_ms=4.0)
    begun_in_a_block = PROMPT // BLOCK_SIZE
    steps.step(60)
    num_blocks = (steps.num_tokens[0] - 1) // BLOCK_SIZE - begun_in_a_block
    assert num_blocks >= 3
    assert steps.layers.num_calls == 1 + num_blocks
    x = steps.input()
    steps.source.forget(np.array([0], np.int32))
    steps.source.keep_up(x)
    assert steps.layers.num_calls == 1 + num_blocks


def test_steps_at_rest_end_before_a_block_is_full() -> None:
    steps = Steps(2, call_ms=4.0)
    for _ in range(40):
        steps.step()
        x = steps.input()
        num_run = (x.num_tokens - 1).tolist()
        skip_draft_steps = steps.source.num_steps_until_due(x)
        assert all((n + skip_draft_steps) // BLOCK_SIZE == n // BLOCK_SIZE for n in num_run)
        assert any((n + skip_draft_steps + 1) % BLOCK_SIZE == 0 for n in num_run)


def test_times_of_calls_lie_between_those_measured_and_follow_what_calls_take() -> None:
    cost = DraftCost()
    cost.observe(1, 1, 100.0)  # nothing was measured, so this says nothing
    assert cost.times(1.0).of(1, 1) < 1
    cost.take(
        [DraftSample("mtp", n, k, 8, 0.1 + 0.02 * n + (k - 1) * (0.05 + 0.01 * n)) for n in (1, 8) for k in (1, 3)]
    )
    assert cost.times(1.0).of(4, 2) == pytest.approx(0.1 + 0.08 + 0.05 + 0.04)
    for _ in range(100):
        cost.observe(4, 2, 2 * 0.27)
    assert cost.times(1.0).of(1, 1) == pytest.approx(2 * 0.12, rel=0.01)
    assert cost.times(2.0).of(1, 1) == pytest.approx(0.12, rel=0.01)


def test_trials_come_in_fours_after_pauses_that_double() -> None:
    trials = Trials()
    due = [i for i in range(500) if trials.is_due(1)]
    assert due == [63, 64, 65, 66, 194, 195, 196, 197, 453, 454, 455, 456]
    trials.note_wanted()
    assert [i for i in range(64) if trials.is_due(1)] == [63]


def test_a_model_that_fills_its_kv_late_is_called_only_to_draft() -> None:
    steps = Steps(fills_late=True)
    steps.layers.is_right = False
    steps.step(300)
    assert steps.source.num_steps_until_due(steps.input()) >= 300
    assert all(sum(asked) > 0 for asked in steps.layers.num_asked)
    assert 0 < steps.layers.num_calls < 100


def test_what_filling_a_prompt_takes_is_charged_to_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes a second; nearly all of the first one is for the prompt."""
    clock = itertools.count()
    monkeypatch.setattr(model_draft_source, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    steps = Steps(fills_late=True)
    steps.num_tokens, steps.source.cost = [800], DraftCost()
    source, charged, deferred = steps.source, [], []
    for _ in range(200):
        source.seconds = source.deferred_s = 0.0
        source.draft(steps.input(), np.full(1, STEPS, np.int32), np.zeros(1, np.float32))
        steps.num_computed, steps.num_tokens = [steps.num_tokens[0] - 1], [steps.num_tokens[0] + 1]
        charged.append(source.seconds)
        deferred.append(source.deferred_s)
    assert charged[0] + deferred[0] == pytest.approx(1.0)
    assert charged[0] < 0.1 < deferred[0]
    assert max(charged) < 1.2
    assert sum(charged) == pytest.approx(200, rel=0.001)
