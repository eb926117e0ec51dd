"""A request whose grammar is being compiled holds no other request back, and ends like any other."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from fastdeploy_sd.config import Config
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import BadRequest, Overloaded
from fastdeploy_sd.types import FinishReason, Request
from tests.doubles.engines import Transcript, run_to_end, toy_config, toy_info, toy_request
from tests.doubles.toy_executor import ToyExecutor
from tests.doubles.toy_grammars import ToyGrammars

SLOW, WRONG = "start: slow", "start: wrong"


@pytest.fixture
def grammars() -> Iterator[ToyGrammars]:
    with closing(ToyGrammars()) as grammars:
        yield grammars


def make_engine(grammars: ToyGrammars | None, config: Config | None = None, num_blocks: int = 32) -> Engine:
    executor = ToyExecutor(toy_info(num_blocks=num_blocks))
    executor.grammars = grammars
    return Engine(config or toy_config(), executor)


def guided(request_id: str, grammar: str = SLOW, max_tokens: int = 3) -> Request:
    return replace(toy_request(request_id, [5, 6, 7], max_tokens), grammar=grammar)


def is_readable(fd: int | None) -> bool:
    assert fd is not None
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def test_those_behind_go_past_until_it_is_ready(grammars: ToyGrammars) -> None:
    engine = make_engine(grammars, toy_config(max_num_seqs=1))
    engine.submit(guided("slow"))
    engine.submit(toy_request("free", [2, 3], 2))
    transcript = Transcript()
    for _ in range(3):
        transcript.add(engine.step())
        engine.check_integrity()
    assert list(transcript.last) == ["free"]
    assert engine.is_stalled
    assert engine.has_work()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_grammar) == (0, 1, 1)
    assert stats.num_free_blocks == stats.num_blocks - stats.num_cached_blocks
    assert not is_readable(engine.arrival_fd)
    grammars.finish(SLOW)
    assert is_readable(engine.arrival_fd)
    engine.submit(toy_request("later", [2, 3], 2))
    run_to_end(engine, transcript)
    assert list(transcript.last) == ["free", "slow", "later"]  # its place is that of its arrival
    assert not is_readable(engine.arrival_fd)
    assert grammars.users[SLOW] == 0


def test_a_grammar_that_is_there_makes_nobody_wait(grammars: ToyGrammars) -> None:
    engine = make_engine(grammars)
    grammars.ready.add(SLOW)
    engine.submit(guided("one"))
    assert engine.step()
    assert engine.stats().num_waiting_for_grammar == 0


def test_a_grammar_that_cannot_be_compiled_ends_its_requests_only(grammars: ToyGrammars) -> None:
    engine = make_engine(grammars)
    for name in ("a", "b"):
        engine.submit(guided(name, WRONG))
    engine.submit(guided("c", SLOW))
    engine.submit(toy_request("free", [2, 3], 2))
    grammars.finish(WRONG, error="no such rule")
    grammars.finish(SLOW)
    transcript = run_to_end(engine)
    for name in ("a", "b"):
        last = transcript.last[name]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error == ("BadRequest", "grammar: expected one that can be compiled, got: no such rule")
        assert last.metrics is not None
    assert {transcript.last[name].finish_reason for name in ("c", "free")} == {FinishReason.LENGTH}
    with pytest.raises(BadRequest, match="no such rule"):  # known by now
        engine.submit(guided("d", WRONG))
    assert not any(grammars.users.values())


def test_it_can_be_aborted_meanwhile_and_its_grammar_may_come_later(grammars: ToyGrammars) -> None:
    engine = make_engine(grammars)
    engine.submit(guided("slow"))
    engine.step()
    [last] = engine.abort(["slow"])
    assert last.finish_reason is FinishReason.ABORT
    engine.check_integrity()
    assert not engine.has_work()
    assert grammars.users[SLOW] == 0
    grammars.finish(SLOW)
    assert engine.step() == []
    assert not is_readable(engine.arrival_fd)


def test_it_counts_against_the_queue(grammars: ToyGrammars) -> None:
    engine = make_engine(grammars, toy_config(max_num_queued_requests=2))
    for name in ("a", "b"):
        engine.submit(guided(name))
    with pytest.raises(Overloaded, match="expected fewer than 2 waiting requests"):
        engine.submit(toy_request("free", [2, 3], 2))
    assert engine.stats().num_waiting_tokens == 6


def test_an_executor_that_guides_nothing_refuses_it() -> None:
    engine = make_engine(None)
    with pytest.raises(BadRequest, match="nothing here guides outputs"):
        engine.submit(guided("one"))
    assert not engine.has_work()


def test_a_preempted_request_keeps_its_grammar(grammars: ToyGrammars) -> None:
    engine = make_engine(grammars, num_blocks=6)
    grammars.ready.add(SLOW)
    for name in ("a", "b"):
        engine.submit(guided(name, max_tokens=14))
    transcript = run_to_end(engine)
    assert engine.stats().num_preemptions > 0
    assert len(transcript.last) == 2
    assert grammars.users[SLOW] == 0
