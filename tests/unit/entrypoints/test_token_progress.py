"""The bar of LLM counts tokens, takes off what sequences end without, and says what drafts are worth."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.entrypoints.offline.batch import TokenProgress
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import Request
from fastdeploy_sd.types.stats import EngineStats


def request(name: str, max_tokens: int) -> Request:
    return Request(name, np.array([5], np.int32), SamplingParams(), max_tokens, 0)


def test_tokens_and_not_sequences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    stats = SimpleNamespace(num_draft_tokens=100, num_accepted_tokens=90)

    def stats_now() -> Any:
        return SimpleNamespace(**vars(stats))

    with TokenProgress([request("a", 10), request("b", 50)], stats_now, is_wanted=True) as bar:
        bar.add("a", 4, is_last=False)
        assert (bar._bar.n, bar._bar.total) == (4, 60)
        bar.add("a", 6, is_last=True)
        bar.add("b", 5, is_last=True)
        assert (bar._bar.n, bar._bar.total) == (15, 15), "b ended 45 tokens early"
        stats.num_draft_tokens, stats.num_accepted_tokens = 140, 120
    shown = capsys.readouterr().err
    assert "tok/s" in shown
    assert "15/15" in shown
    assert "2/2 done, 75% of drafts accepted" in shown


def test_nothing_is_shown_or_asked_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> EngineStats:
        raise AssertionError("no client reads it")

    with TokenProgress([request("a", 10)], never, is_wanted=True) as bar:
        bar.add("a", 4, is_last=True)
    assert capsys.readouterr().err == ""
