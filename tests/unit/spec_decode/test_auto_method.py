"""The method `auto` of a server: what it learns from steps, when it rests, and what it tells."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fastdeploy_sd.config import SpeculativeConfig
from fastdeploy_sd.spec_decode.control.controller import DraftController
from fastdeploy_sd.spec_decode.control.profile import CostProfile, StepSample
from fastdeploy_sd.spec_decode.dispatcher import available_methods
from fastdeploy_sd.spec_decode.proposer import DraftRequest
from fastdeploy_sd.types.draft_methods import METHODS
from tests.unit.spec_decode.auto_server import PHRASE, K, Server, random_text, repeated


def test_what_repeats_is_drafted_at_length_and_counted() -> None:
    server = Server([repeated()])
    server.step(60)
    assert server.num_tokens[0] > 24 + 60 * 4
    report = server.step_stats.report
    assert report is not None
    assert report.num_steps["drafts"] > 20
    assert report.calibrations["suffix"].num_scored >= report.calibrations["suffix"].observed > 20


@pytest.fixture
def asking_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is 50 us later at every call."""
    looks = itertools.count(1)
    monkeypatch.setattr("fastdeploy_sd.spec_decode.control.method.time.perf_counter", lambda: 5e-5 * next(looks))


@pytest.mark.usefixtures("asking_takes_long")
def test_steps_that_go_on_alike_are_chosen_for_as_others_are() -> None:
    """Some are only looked at, and their rows are bound already."""
    texts = [random_text(60, seed) + repeated(200) + random_text(40, seed + 9) + repeated() for seed in (1, 2)]
    usual, kept = Server(texts), Server(texts)
    kept.kept = kept._input(K)
    for server in (usual, kept):
        steps = [StepSample(rows, n, 8, 1.0 + 0.1 * (rows - n)) for n in (1, 2) for rows in (n, 2 * n, 8 * n)]
        server.step_stats.profile = CostProfile({}, {}, tuple(steps))
    for step in range(100):
        for server in (usual, kept):
            server.step(host_s=1e-4)
        assert kept.drafts == usual.drafts or step > 80  # what looks took counts as lost: one draft may differ for that
    assert kept.num_tokens == pytest.approx(usual.num_tokens, rel=0.05)
    assert min(kept.num_tokens) > 24 + 2 * 100


def test_look_ups_that_others_cover_are_left_out_while_asking_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look_s = itertools.count(1), [1e-4]
    clock = itertools.accumulate(look_s[0] for _ in looks)
    monkeypatch.setattr("fastdeploy_sd.spec_decode.control.method.time.perf_counter", lambda: next(clock))
    server = Server([repeated()])
    scored: list[dict[str, int]] = []
    for seconds in (1e-4, 1e-6):
        look_s[0] = seconds
        server.step(36, limit=2)
        assert server.step_stats.report is not None
        scored.append({name: j.num_scored for name, j in server.step_stats.report.calibrations.items()})
    assert scored[0]["ngram"] < 5
    assert scored[0]["suffix"] > 40
    assert scored[1]["ngram"] > 40


@pytest.mark.usefixtures("asking_takes_long")
def test_where_no_source_has_a_draft_a_probe_comes_before_everything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    ask = DraftController.ask_again

    def look(policy: DraftController) -> int:
        looks.append(ask(policy))
        return looks[-1]

    monkeypatch.setattr(DraftController, "ask_again", look)
    server = Server([random_text(380) + repeated(132)])
    server.kept = server._input(K)
    server.step(380 - 24)
    assert server.num_tokens[0] == 380
    assert len(looks) > server.asked / 2  # the others ask in full, or find something
    assert looks.count(0) > 0.9 * len(looks)
    report = server.step_stats.report
    assert report is not None
    assert sum(report.num_steps.values()) > 200  # looks are counted, as rests are
    before, num_probes = server.num_tokens[0], len(looks)
    server.step(30)
    assert server.num_tokens[0] - before > 80
    assert len(looks) < num_probes + 10


@pytest.mark.usefixtures("asking_takes_long")
def test_where_no_source_knows_anything_most_steps_do_not_ask() -> None:
    server = Server([random_text()])
    server.step(200)
    assert server.num_tokens[0] == 24 + 200
    assert server.asked < 40
    server.step(40)
    assert server.step_stats.report is not None
    assert server.step_stats.report.num_steps["no_drafter"] > 150
    assert server.step_stats.report.reason == "no_drafter"


def test_a_text_that_begins_to_repeat_is_noticed_within_a_rest() -> None:
    server = Server([random_text(200) + repeated(300)])
    server.step(200 - 24)
    before = server.num_tokens[0]
    server.step(50)
    assert server.num_tokens[0] - before > 120


def test_expensive_drafts_are_left_out_as_soon_as_their_price_is_known() -> None:
    server = Server([repeated()])
    steps = [StepSample(rows, 1, 8, 1.0 + 2.0 * (rows - 1)) for rows in (1, 2, 8)]
    server.step_stats.profile = CostProfile({}, {}, tuple(steps))
    server.step(100, row_s=2e-3)
    assert server.num_tokens[0] == 24 + 100
    server.step(100, row_s=2e-3)
    assert server.step_stats.report is not None
    assert server.step_stats.report.num_steps["load"] > 50


def test_what_the_engine_takes_between_steps_makes_expensive_drafts_worth_it() -> None:
    server = Server([repeated()])
    steps = [StepSample(rows, 1, 8, 1.0 + 2.0 * (rows - 1)) for rows in (1, 2, 8)]
    server.step_stats.profile = CostProfile({}, {}, tuple(steps))
    server.step(60, row_s=2e-3, host_s=20e-3)
    assert server.num_tokens[0] > 24 + 60 * 4
    assert server.step_stats.report is not None
    assert server.step_stats.report.measured_s == pytest.approx(server.step_stats.report.predicted_s, rel=0.25)


def test_what_lies_between_two_requests_in_a_table_row_is_no_part_of_a_step() -> None:
    """Prompts that need no step of their own, as those that are cached: one draft brings a token for four plain steps.

    An idle second taken for the engine's part would make it worth that.
    """
    text = repeated()
    server = Server([text], num_prompt=200)
    steps = [StepSample(rows, 1, 8, 1.0 + 4.0 * (rows - 1)) for rows in (1, 2, 8)]
    server.step_stats.profile = CostProfile({}, {}, tuple(steps))
    for i in range(20):
        begin = 24 + 100 * (i % 2)
        server.router.forget(np.zeros(1, np.int32))
        server.num_tokens, server.drafts = [begin], [0]
        server.router.begin([DraftRequest(f"r{i}", 0, begin, begin)])
        server.step(1, row_s=4e-3, host_s=1.0)
    server.step(4, row_s=4e-3)
    assert server.num_tokens == [begin + 5]


def test_the_predicted_time_is_what_steps_take() -> None:
    server = Server([repeated(), repeated()])
    steps = [StepSample(rows, 1, 8, 1.0 + 0.1 * (rows - 1)) for rows in (1, 2, 8, 40)]
    server.step_stats.profile = CostProfile({}, {}, tuple(steps))
    server.step(35)
    report = server.step_stats.report
    assert report is not None
    assert report.predicted_s > 0
    assert report.measured_s == pytest.approx(report.predicted_s, rel=0.25)


def test_requests_that_allow_none_get_none() -> None:
    server = Server([repeated()])
    server.step(100, limit=0)
    server.step(100, limit=0)
    assert server.num_tokens[0] == 24 + 200
    assert server.step_stats.report is not None
    assert server.step_stats.report.num_steps["request"] > 90


def test_a_request_that_names_a_method_gets_it_whatever_is_worth_its_time() -> None:
    server = Server([repeated(), random_text()], methods=["suffix", ""])
    steps = [StepSample(rows, 1, 8, 1.0 + 5.0 * (rows - 1)) for rows in (1, 2, 8)]
    server.step_stats.profile = CostProfile({}, {}, tuple(steps))
    server.step(60, row_s=5e-3)
    assert server.num_tokens[0] > 24 + 60 * 4
    assert server.num_tokens[1] == 24 + 60


def test_a_draft_must_be_worth_the_time_of_requests_that_forbid_drafts_too() -> None:
    """It brings one token: to one request for 1.6 plain steps instead of two, to four for the same."""
    for others, num_tokens in (([], 24 + 2 * 40), (["naive"] * 3, 24 + 40)):
        server = Server([repeated(), *[random_text()] * len(others)], methods=["", *others])
        steps = [StepSample(n + d, n, 8, 1.0 + 0.6 * d) for n in (1, 4) for d in (0, 1, 4)]
        server.step_stats.profile = CostProfile({}, {}, tuple(steps))
        server.step(40, limit=1, row_s=0.6e-3)
        assert server.num_tokens[0] == pytest.approx(num_tokens, abs=3)


@pytest.mark.parametrize("methods", [["", "naive"], ["naive", "naive"]])
@pytest.mark.usefixtures("asking_takes_long")
def test_requests_that_forbid_drafts_keep_no_step_from_rest(methods: list[str]) -> None:
    server = Server([random_text(), repeated()], methods=methods)
    server.step(240)
    assert server.num_tokens == [24 + 240] * 2
    assert server.asked < 50
    assert server.step_stats.report is not None
    assert server.step_stats.report.reason == ("no_drafter" if "" in methods else "request")


def test_drafts_that_lose_are_found_out_among_requests_that_forbid_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts take twenty times what is expected: the detector compares all tokens of a step, of whatever request."""
    monkeypatch.setattr("fastdeploy_sd.spec_decode.control.method.time.perf_counter", lambda: 0.0)
    text = [t for i in range(200) for t in (*PHRASE[:2], 100 + i)]  # two of three tokens repeat themselves
    server = Server([text, random_text()], methods=["", "naive"])
    server.step(180, row_s=2e-3)
    report = server.step_stats.report
    assert report is not None
    assert report.num_steps["low_gain"] > 40


def test_auto_is_there_only_where_it_is_configured() -> None:
    assert available_methods(SpeculativeConfig(method="auto", num_speculative_tokens=4)) == (
        "naive", "ngram", "suffix", "auto",
    )  # fmt: skip
    assert "auto" not in available_methods(SpeculativeConfig(method="suffix", num_speculative_tokens=4))
    assert METHODS["auto"].source is None
