"""The line in the log that says what drafting brings."""

from __future__ import annotations

import logging

import pytest

from fastdeploy_sd.config import Config, ModelConfig, SpeculativeConfig
from fastdeploy_sd.engine import draft_log
from fastdeploy_sd.engine.draft_log import DraftLog, summary
from fastdeploy_sd.types import Calibration, ChoiceReport, DraftCounts, SpeculationInfo
from fastdeploy_sd.types.stats import EngineStats, SourceCounts
from tests.doubles.bench import Bench, oracle
from tests.doubles.engines import toy_request

BEFORE = EngineStats(num_token_steps=100, num_generated_tokens=150, drafts={"ngram": SourceCounts((50,), (50,), (40,))})


def later(choice: ChoiceReport | None = None, **drafts: SourceCounts) -> EngineStats:
    verifications = {"auto": DraftCounts(10, 20)} if drafts else {}
    sources = dict(BEFORE.drafts) | drafts
    return EngineStats(
        num_token_steps=200, num_generated_tokens=400, drafts=sources, verifications=verifications, choice=choice
    )


def test_a_line_is_about_the_time_since_the_one_before() -> None:
    now = later(ngram=SourceCounts((70, 20), (70, 20), (50, 10)), eagle=SourceCounts((150,), (150,), (130,)))
    assert summary(now, BEFORE) == "drafts: 2.50 tokens per step, of these by source: eagle 1.30, ngram 0.20"


def test_a_method_that_chooses_adds_its_gain_and_its_choices() -> None:
    choice = ChoiceReport(1.5, num_steps={"drafts": 7, "load": 2, "request": 0})
    end = "; gain 1.50 times plain decoding; steps by choice: drafts 7, load 2"
    assert summary(later(choice), BEFORE) == f"drafts: 2.50 tokens per step, of these by source: none{end}"
    unknown = summary(later(ChoiceReport(0.0, num_steps={"drafts": 7})), BEFORE)
    assert unknown.endswith("; gain not known yet; steps by choice: drafts 7")


def test_plain_decoding_and_idle_times_have_no_line() -> None:
    assert summary(later(), BEFORE) == ""
    assert summary(BEFORE, BEFORE) == ""


def drafted(scored: int, right: int, method: str = "eagle") -> EngineStats:
    counts = {method: SourceCounts((scored + 7, 9), (scored, right), (right, 0))}
    return EngineStats(speculation=SpeculationInfo(method, ("naive", "ngram", method), 3), drafts=counts)


@pytest.mark.parametrize(
    ("stats", "is_misread"),
    [
        (drafted(49, 0), False),
        (drafted(50, 0), True),
        (drafted(180, 1), False),
        (drafted(300, 14), True),
        (drafted(300, 40), False),
        (drafted(300, 0, "mtp"), False),
        (drafted(300, 0, "ngram"), False),
    ],
)
def test_a_drafter_whose_drafts_are_next_to_never_right_is_named(stats: EngineStats, is_misread: bool) -> None:
    """Other sources have no files that could be read otherwise."""
    assert stats.misread_drafter == ("eagle" if is_misread else "")


@pytest.mark.parametrize(("observed", "named"), [(0, "hydra"), (40, "")])
def test_a_method_that_chooses_counts_the_drafts_that_it_dropped(observed: int, named: str) -> None:
    choice = ChoiceReport(calibrations={"suffix": Calibration(900, 9.0, 0), "hydra": Calibration(90, 9.0, observed)})
    info = SpeculationInfo("auto", ("naive", "ngram", "suffix", "auto", "hydra"), 3)
    assert EngineStats(speculation=info, choice=choice).misread_drafter == named


def test_the_engine_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(draft_log, "_SECONDS_PER_LINE", 0.0)
    speculative = SpeculativeConfig("eagle", 3, model="/heads/one")
    log = DraftLog(Config(model=ModelConfig("demo"), speculative=speculative))
    for _ in range(3):
        log.note_step(lambda: drafted(300, 1))
    [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("fewer than one in 20 drafts of eagle is right: /heads/one may be read otherwise")
    assert "`fastdeploy-sd drafter check /heads/one --model demo`" in warning


def test_an_engine_writes_it_while_it_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(draft_log, "_SECONDS_PER_LINE", 0.0)
    request = toy_request("a", range(2, 7), 20)
    bench = Bench(info={"max_draft_tokens": 3}, proposer=oracle([request]))
    bench.submit(request)
    with caplog.at_level(logging.INFO, logger=draft_log.__name__):
        while bench.engine.has_work():
            bench.step()
    lines = [record.message for record in caplog.records if record.name == draft_log.__name__]
    assert "drafts: 4.00 tokens per step, of these by source: mtp 2.00, ngram 1.00" in lines, lines
