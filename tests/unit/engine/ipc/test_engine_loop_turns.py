"""The engine loop turn by turn: which messages have arrived before a step is the test's to say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.ipc import messages as m
from fastdeploy_sd.engine.ipc.engine_loop import EngineLoop
from fastdeploy_sd.types import FinishReason, Request, RequestId, SchedulerOutput
from fastdeploy_sd.wire.channel import ServerChannel
from tests.doubles.connectors import ToyConnector
from tests.doubles.engines import toy_config, toy_info, toy_request
from tests.doubles.toy_executor import ToyExecutor

Turn = Sequence[tuple[bytes, m.Message]]


class ScriptedChannel:
    """Delivers the messages of one turn per wait, and Bye from everyone when the script is over."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = list(turns)
        self._arrived: list[tuple[bytes, bytes]] = []
        self.loop: EngineLoop | None = None
        self.engine: Engine | None = None
        self.sent: list[tuple[bytes, m.Message]] = []
        self.timeouts: list[float | None] = []
        self.watched: list[int] = []

    def wait(self, timeout_s: float | None) -> set[int]:
        self.timeouts.append(timeout_s)
        turn = self._turns.pop(0) if self._turns else [(identity, m.ClientDisconnect()) for identity in (b"A", b"B")]
        self._arrived = [(identity, m.encode(message)) for identity, message in turn]
        if not self._turns and self.loop is not None:
            self.loop.drain()
        return set()

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        while self._arrived:
            yield self._arrived.pop(0)

    def send(self, identity: bytes, frame: bytes) -> bool:
        self.sent.append((identity, m.decode(frame)))
        return True

    def watch(self, fd: int) -> None:
        self.watched.append(fd)

    def unwatch(self, fd: int) -> None: ...

    def close(self, linger_s: float) -> None: ...

    def replies_to(self, identity: bytes, kind: type) -> list[object]:
        return [message for to, message in self.sent if to == identity and isinstance(message, kind)]

    def num_finished(self) -> dict[str, int]:
        assert self.engine is not None
        return {reason: count for reason, count in self.engine.stats().num_finished.items() if count}

    def outputs_to(self, identity: bytes) -> list[m.Outputs]:
        return [message for to, message in self.sent if to == identity and isinstance(message, m.Outputs)]


def _play(
    turns: Sequence[Turn], submit_s: float = 1e6, **config: Any
) -> tuple[ScriptedChannel, list[tuple[RequestId, ...]]]:
    """Run a loop over the turns; return the channel and the requests of every step. `submit_s` 0 is one submission."""
    plans: list[tuple[RequestId, ...]] = []

    def note(plan: SchedulerOutput) -> None:
        plans.append(plan.request_ids)

    channel = ScriptedChannel([[(b"A", m.ClientHello(os.getpid())), (b"B", m.ClientHello(os.getpid()))], *turns])
    engine = Engine(toy_config(max_num_batched_tokens=64, **config), ToyExecutor(toy_info(), before_step=note))
    channel.loop = EngineLoop(engine, cast(ServerChannel, channel), 1e6, receive_s=1e6, submit_s=submit_s)
    channel.engine = engine
    assert channel.loop.run() == 0
    engine.check_integrity()
    return channel, plans


def test_an_abort_takes_effect_before_the_next_step() -> None:
    submits: Turn = [(b"A", m.Submit(i, toy_request(f"a{i}", [5, i], max_tokens=50))) for i in (1, 2)]
    abort: Turn = [(b"A", m.Abort((1, 99)))]
    channel, plans = _play([submits, [], abort, []])
    assert plans == [("a1", "a2"), ("a1", "a2"), ("a2",), ("a2",)]
    reasons = [o.finish_reason for sent in channel.outputs_to(b"A") for o in sent.outputs if o.request_id == "a1"]
    assert reasons == [None, None, FinishReason.ABORT]


def test_a_request_aborted_in_the_turn_it_came_never_runs() -> None:
    turn: Turn = [(b"A", m.Submit(1, toy_request("a", [5]))), (b"A", m.Abort((1,)))]
    channel, plans = _play([turn, []])
    assert plans == []
    assert [sent.handles for sent in channel.outputs_to(b"A")] == [(1,)]


def test_an_id_is_free_in_the_turn_of_its_abort() -> None:
    first: Turn = [(b"A", m.Submit(1, toy_request("a", [5], max_tokens=50)))]
    second: Turn = [(b"A", m.Abort((1,))), (b"A", m.Submit(2, toy_request("a", [6], max_tokens=2)))]
    channel, plans = _play([first, second, [], []])
    assert plans == [("a",)] * 3
    ends = [(h, o.finish_reason) for s in channel.outputs_to(b"A") for h, o in zip(s.handles, s.outputs, strict=True)]
    assert ends == [(1, None), (1, FinishReason.ABORT), (2, None), (2, FinishReason.LENGTH)]


def test_a_step_sends_each_client_one_message() -> None:
    submits: Turn = [
        *((b"A", m.Submit(i, toy_request(f"a{i}", [5, i], max_tokens=3))) for i in (1, 2)),
        (b"B", m.Submit(1, toy_request("b1", [7], max_tokens=3))),
    ]
    channel, plans = _play([submits, [], [], []])
    assert len(plans) == 3
    assert [sent.handles for sent in channel.outputs_to(b"A")] == [(1, 2)] * 3
    assert [sent.handles for sent in channel.outputs_to(b"B")] == [(1,)] * 3


def test_nobody_can_abort_the_requests_of_another_client() -> None:
    submit: Turn = [(b"A", m.Submit(1, toy_request("a", [5], max_tokens=2)))]
    channel, _ = _play([submit, [(b"B", m.Abort((1,)))], []])
    assert channel.outputs_to(b"A")[-1].outputs[-1].finish_reason is FinishReason.LENGTH


def test_bye_frees_everything_of_that_client_only() -> None:
    submits: Turn = [
        (b"A", m.Submit(1, toy_request("a", [5], max_tokens=50))),
        (b"B", m.Submit(1, toy_request("b", [5], max_tokens=3))),
    ]
    channel, plans = _play([submits, [(b"A", m.ClientDisconnect())], [], []])
    assert plans == [("a", "b"), ("b",), ("b",)]
    assert len(channel.outputs_to(b"A")) == 1
    assert not any(to == b"A" and isinstance(message, m.EngineDead) for to, message in channel.sent)


def test_what_arrives_after_the_wish_to_stop_is_rejected() -> None:
    """The last turn of a script comes with the wish."""
    channel, plans = _play([[(b"A", m.Submit(1, toy_request("a", [5])))]])
    assert plans == []
    kinds = [message for to, message in channel.sent if to == b"A"][1:]
    assert [type(message) for message in kinds] == [m.Notice, m.Rejected, m.EngineDead]
    assert isinstance(kinds[1], m.Rejected)
    assert kinds[1].error.kind == "Unavailable"


def burst(count: int, max_tokens: int = 50) -> list[tuple[bytes, m.Message]]:
    return [(b"A", m.Submit(i, toy_request(f"a{i}", [5, i + 2], max_tokens=max_tokens))) for i in range(count)]


def test_a_burst_of_submissions_holds_no_step_up_and_no_question() -> None:
    running: Turn = [(b"B", m.Submit(1, toy_request("b", [7], max_tokens=50)))]
    question: Turn = [*burst(3), (b"B", m.StatsRequest(8))]
    channel, plans = _play([running, question, [], [], []], submit_s=0)
    assert plans[:4] == [("b",), ("b", "a0"), ("b", "a0", "a1"), ("b", "a0", "a1", "a2")]
    [reply] = channel.replies_to(b"B", m.StatsReply)
    assert isinstance(reply, m.StatsReply)
    assert reply.stats.num_requests == 1, "asked behind the burst, answered before it"


def test_a_submission_that_waits_can_be_aborted() -> None:
    channel, plans = _play([[*burst(4), (b"A", m.Abort((1, 2)))], [], [], []], submit_s=0)
    assert "a1" not in {i for plan in plans for i in plan}
    ends = {
        h: o.finish_reason for sent in channel.outputs_to(b"A") for h, o in zip(sent.handles, sent.outputs, strict=True)
    }
    assert (ends[1], ends[2]) == (FinishReason.ABORT, FinishReason.ABORT)
    assert plans[-1] == ("a0", "a3")


def test_what_waits_of_a_client_that_leaves_is_forgotten() -> None:
    channel, plans = _play([burst(4), [(b"A", m.ClientDisconnect())], [], []], submit_s=0)
    assert {i for plan in plans for i in plan} == {"a0"}
    assert channel.engine is not None
    assert not channel.engine.has_work()


def test_submissions_that_wait_when_the_server_stops_are_rejected() -> None:
    channel, _ = _play([burst(4, max_tokens=1)], submit_s=0)
    assert [reply.handle for reply in channel.replies_to(b"A", m.Rejected)] == [0, 1, 2, 3]  # type: ignore[attr-defined]


def test_a_request_that_a_stop_string_completed_counts_as_stopped() -> None:
    abort: Turn = [(b"A", m.Abort((0,), FinishReason.STOP)), (b"A", m.Abort((1,)))]
    channel, _ = _play([burst(3, max_tokens=3), abort, [], []])
    assert channel.num_finished() == {"stop": 1, "abort": 1, "length": 1}
    ends = {o.request_id: o.finish_reason for sent in channel.outputs_to(b"A") for o in sent.outputs if o.finish_reason}
    assert ends == {"a0": FinishReason.STOP, "a1": FinishReason.ABORT, "a2": FinishReason.LENGTH}


def test_a_request_that_cannot_be_taken_is_rejected_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.submit

    def submit(engine: Engine, request: Request) -> None:
        if request.request_id == "a1":
            raise MemoryError("no room for its books")
        real(engine, request)

    monkeypatch.setattr(Engine, "submit", submit)
    channel, plans = _play([burst(3, max_tokens=2), [], []])
    assert {i for plan in plans for i in plan} == {"a0", "a2"}
    [reply] = channel.replies_to(b"A", m.Rejected)
    assert isinstance(reply, m.Rejected)
    assert (reply.handle, reply.error.kind) == (1, "InternalError")
    assert channel.num_finished() == {"length": 2}


class ArrivingChannel(ScriptedChannel):
    """Lets the KV of request a1 arrive before the turn with this number."""

    def __init__(self, turns: Sequence[Turn], connector: ToyConnector, number: int) -> None:
        super().__init__(turns)
        self._connector, self._number = connector, number

    def wait(self, timeout_s: float | None) -> set[int]:
        if len(self.timeouts) == self._number:
            self._connector.finish("a1", 2, 0)
        return super().wait(timeout_s)


def test_the_loop_sleeps_while_all_kv_is_on_its_way() -> None:
    """It is woken by the connector's descriptor, by messages, and by the end of the time to drain."""
    executor, connector = ToyExecutor(toy_info()), ToyConnector(0, rate=1.0)
    connector.executor, connector.fd = executor, 12345
    turns: list[Turn] = [[(b"A", m.ClientHello(os.getpid()))], [(b"A", m.Submit(1, toy_request("a1", [5, 6, 7], 2)))]]
    channel = ArrivingChannel([*turns, [], [], [], []], connector, number=4)
    engine = Engine(toy_config(), executor, connector)
    channel.engine, channel.loop = engine, EngineLoop(engine, cast(ServerChannel, channel), 1e6, receive_s=1e6)
    assert channel.loop.run() == 0
    assert 12345 in channel.watched
    # Idle twice, then the request waits, in the third of these turns it arrives, and runs two steps.
    assert channel.timeouts[:6] == [None, None, None, None, None, 0]
    assert channel.num_finished() == {"length": 1}
    assert channel.outputs_to(b"A")[-1].outputs[0].finish_reason is FinishReason.LENGTH


def test_a_draining_loop_does_not_wait_for_kv_for_ever() -> None:
    executor, connector = ToyExecutor(toy_info()), ToyConnector(0, rate=1.0)
    connector.executor, connector.fd = executor, 12345
    turns: list[Turn] = [[(b"A", m.ClientHello(os.getpid()))], [(b"A", m.Submit(1, toy_request("a1", [5, 6, 7], 2)))]]
    channel = ScriptedChannel([*turns, []])
    engine = Engine(toy_config(), executor, connector)
    channel.engine, channel.loop = engine, EngineLoop(engine, cast(ServerChannel, channel), 0.2, receive_s=1e6)
    assert channel.loop.run() == 0
    assert channel.timeouts[:3] == [None, None, None]
    draining = channel.timeouts[3]
    assert draining is not None
    assert draining <= 0.2
    assert channel.num_finished() == {"abort": 1}
    assert connector.num_cancelled == 1
