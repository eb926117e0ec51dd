"""The method `auto` with certain drafts: these stay, and say nothing of guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.decision import Decision, StepForecast
from fastdeploy_sd.spec_decode.control.profile import CostProfile, StepSample
from fastdeploy_sd.spec_decode.control.proposer import AutoProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput, Proposer
from fastdeploy_sd.types import DraftSource, DraftTokens, offsets
from tests.unit.spec_decode.auto_server import Server, random_text, repeated


class Foretold(Proposer):
    """A partial method that knows a text, and drafts the next three tokens at every fourth place."""

    source, is_certain = DraftSource.GRAMMAR, True

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    @property
    def proposer(self) -> Proposer:
        return self

    def serves(self, request: DraftRequest) -> bool:
        return True

    def propose(self, x: ProposeInput) -> DraftTokens:
        rows = [self.text[n : n + 3] if n % 4 == 0 else [] for n in x.num_tokens.tolist()]
        token_ids = [token_id for row in rows for token_id in row]
        return DraftTokens(np.array(token_ids, np.int32), offsets([len(row) for row in rows]))


@pytest.mark.parametrize("least_gain", [1.5, float("inf")])
def test_certain_drafts_stay_when_guesses_must_bring_more_or_are_off(
    least_gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token in four is chosen; the text repeats itself, so that there are guesses as well."""
    monkeypatch.setattr("fastdeploy_sd.spec_decode.control.method.time.perf_counter", lambda: 0.0)
    learn, decide = DraftController.observe_and_decide, AutoProposer.decide

    def demand(*args: Any, **how: Any) -> StepForecast:
        known = learn(*args, **(how | {"decides": False}))
        return known._replace(least_gain=least_gain, is_off=float(np.isinf(least_gain)))

    def decide_on(auto: AutoProposer, x: ProposeInput) -> Decision:
        if np.isfinite(least_gain):
            auto.controller.params.least_gain = least_gain
        return decide(auto, x)

    monkeypatch.setattr(DraftController, "observe_and_decide", demand)
    monkeypatch.setattr(AutoProposer, "decide", decide_on)
    text = repeated()
    server = Server([text], per_request_methods=(Foretold(text),))
    steps = [StepSample(rows, 1, 8, 1.0 + 0.9 * (rows - 1)) for rows in (1, 2, 8)]  # a guess brings 1.05 times plain
    server.step_stats.profile = CostProfile({}, {}, tuple(steps))
    server.step(80, row_s=0.9e-3)
    assert server.num_tokens[0] == 24 + 80 * 4


class AlwaysForetold(Foretold):
    """Knows the next token of the first row in every step."""

    def serves(self, request: DraftRequest) -> bool:
        return request.request_id == "r0"

    def propose(self, x: ProposeInput) -> DraftTokens:
        rows = zip(x.num_tokens.tolist(), x.max_draft_len.tolist(), strict=True)
        found = [self.text[n : n + min(limit, 1)] for n, limit in rows]
        token_ids = [token_id for row in found for token_id in row]
        return DraftTokens(np.array(token_ids, np.int32), offsets([len(row) for row in found]))


def test_a_row_with_a_certain_draft_in_every_step_keeps_no_other_from_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is time for a plain step, to compare the others with."""
    monkeypatch.setattr("fastdeploy_sd.spec_decode.control.method.time.perf_counter", lambda: 0.0)
    text = random_text()
    server = Server([text, repeated()], per_request_methods=(AlwaysForetold(text),))
    server.step(3, limit=0)
    for _ in range(2):
        before = list(server.num_tokens)
        server.step(55, limit=3)
        gained = np.subtract(server.num_tokens, before)
        assert gained[0] > 1.9 * 55
        assert gained[1] > 3.5 * 55
    assert server.step_stats.report is not None
    assert server.step_stats.report.num_steps["comparison"] in (1, 2, 3)


def test_certain_drafts_say_nothing_of_guesses() -> None:
    text = random_text()
    server = Server([text], per_request_methods=(Foretold(text),))
    server.step(100)
    assert server.num_tokens[0] > 24 + 3 * 100
    assert server.step_stats.report is not None
    assert server.step_stats.report.gain == 0
