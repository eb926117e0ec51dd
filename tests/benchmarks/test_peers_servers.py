"""The comparison over HTTP, with a small server that counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.peers import over_http
from benchmarks.peers.catalogue import Plan
from benchmarks.peers.launch import Launch
from benchmarks.peers.over_http import Server, Texts, measure_http
from benchmarks.peers.process import PeerError
from fastdeploy_sd.config import DEMO_MODEL, ModelConfig

pytestmark = pytest.mark.slow

PLAN = Plan(concurrency=(1, 3), http_requests=2, prompt_len=16, output_len=24, server_rounds=2)
Start = Callable[[str], Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts servers; `fault` as in tests/doubles/peer_server.py."""
    monkeypatch.setattr(over_http, "CHECKPOINT", ModelConfig(DEMO_MODEL).path)
    started: list[Server] = []

    def start_one(fault: str) -> Server:
        command = [sys.executable, "-m", "tests.doubles.peer_server"]
        started.append(Server(lambda port: Launch([*command, str(port), fault], {}), tmp_path / f"{len(started)}.log"))
        return started[-1]

    yield start_one
    for server in started:
        server.close()


def test_a_case_is_all_tokens_over_the_time_to_the_last(start: Start) -> None:
    server = start("")
    server.wait()
    server.pause()
    rounds: list[None] = []
    cases = measure_http({"ours": server}, PLAN, lambda: rounds.append(None))
    assert [(case.case, case.work, case.failed) for case in cases] == [("1", 48, None), ("3", 72, None)]
    assert all(len(case.seconds) == 2 and case.median_seconds() > 0 for case in cases)
    assert len(rounds) == PLAN.num_rounds("http")


def test_prompts_of_all_rounds_and_cases_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    class Remembering:
        def resume(self) -> None: ...

        def pause(self) -> None: ...

        def run(self, texts: Texts) -> float:
            seen.extend(texts.prompts())
            return 1.0

    [one, three] = measure_http({"ours": Remembering()}, PLAN, lambda: None)  # type: ignore[dict-item]
    assert (one.tokens_per_s(), three.tokens_per_s()) == (48, 72)
    assert len({tuple(prompt) for prompt in seen}) == len(seen) == 2 * (2 + 3)


def test_a_wrong_text_is_no_answer(start: Start) -> None:
    with pytest.raises(PeerError, match=r"text: expected .*, got 'nonsense'"):
        start("text").wait()


def test_a_server_that_does_not_start_says_why(start: Start) -> None:
    with pytest.raises(PeerError, match="expected it to start, got: no room for the model"):
        start("dead").wait()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash", "request: expected an answer, got RemoteProtocolError: .*; an illegal instruction"),
        ("silent", "request: expected an answer, got ReadTimeout: "),
        ("shape", r"answer: expected a text at choices\[0\].text, got '{\"choices\": \[\]}'"),
        ("names", r"answer: expected a text at data\[0\].id, got '{\"data\": \[\]}'"),
    ],
)
def test_a_server_that_fails_when_asked_is_out(
    start: Start, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setattr(over_http, "ANSWER_TIMEOUT_S", 0.5 if fault == "silent" else 60.0)
    with pytest.raises(PeerError, match=reason):
        start(fault).wait()


def test_a_load_that_does_not_end_is_no_figure(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_http, "ANSWER_TIMEOUT_S", 0.5)
    server = start("silent")
    with pytest.raises(PeerError, match="request: expected an answer"):
        server.wait()
    with pytest.raises(PeerError, match="load: expected its end within 0 s, got none"):
        server.run(Texts(num_requests=1, prompt_len=8, output_len=24, concurrency=1))


def test_too_few_tokens_are_no_figure(start: Start) -> None:
    server = start("length")
    with pytest.raises(PeerError, match="text: expected"):
        server.wait()
    load = Texts(num_requests=1, prompt_len=8, output_len=24, concurrency=1)
    with pytest.raises(PeerError, match="request: expected 24 tokens, got 23"):
        server.run(load)
