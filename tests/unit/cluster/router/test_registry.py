"""Who may register, and what is refused: other secrets, what was said before, other roles and versions."""

from __future__ import annotations

import struct
import time
from dataclasses import replace

import pytest

from fastdeploy_sd.cluster import messages as m
from fastdeploy_sd.cluster.membership import DECODE, PREFILL, InstanceLoad
from fastdeploy_sd.errors import BadRequest, Forbidden, NotFound
from fastdeploy_sd.wire.protocol import Protocol, mac
from tests.unit.cluster.router.registrations import KEY, KV, LOCAL, NOW, SAID, register, registry_of, said, signed

LOAD = InstanceLoad(num_running=3, max_num_seqs=8)


def sealed(frame: bytes) -> bytes:
    """A frame, whatever it holds, with the signature of a registration."""
    return mac(KEY, f"router\0{m.REGISTER}", frame) + frame


def test_an_instance_comes_is_heard_and_goes() -> None:
    registry = registry_of()
    session = register(registry)
    assert [str(i.target) for i in registry.available()] == ["127.0.0.1:8000"]
    registry.heartbeat(signed(m.HEARTBEAT, m.Heartbeat(session, 1, LOAD, NOW)))
    assert registry.instances[0].load == LOAD
    registry.deregister(signed(m.DEREGISTER, m.Heartbeat(session, 2, LOAD, NOW)))
    assert registry.instances == []
    with pytest.raises(NotFound):
        registry.heartbeat(signed(m.HEARTBEAT, m.Heartbeat(session, 3, LOAD, NOW)))


def test_engines_of_one_server_have_one_address_which_another_server_takes_over() -> None:
    registry = registry_of()
    for name in ("s.0", "s.1"):
        register(registry, said(instance_id=name))
    assert [i.label for i in registry.available()] == ["127.0.0.1:8000 engine 0", "127.0.0.1:8000 engine 1"]
    session = register(registry, said(instance_id="s.1", kv_address="tcp://:9"))  # it was started again
    assert [i.member.kv_address for i in registry.instances] == ["", "tcp://:9"]
    registry.heartbeat(signed(m.HEARTBEAT, m.Heartbeat(session, 1, replace(LOAD, takes_requests=False), NOW)))
    assert [i.instance_id for i in registry.available()] == ["s.0"]
    register(registry, said(instance_id="another"))
    assert [i.instance_id for i in registry.instances] == ["another"]


def test_another_secret_is_refused_and_so_is_a_signature_for_another_purpose() -> None:
    registry = registry_of()
    registration = replace(SAID, challenge=registry.challenge())
    for frame in (
        signed(m.REGISTER, registration, b"x" * 32),
        signed(m.HEARTBEAT, registration),
        m.PROTOCOL.encode(registration),
        b"\xff",
        signed(m.REGISTER, registration) + b"x",
    ):
        with pytest.raises(Forbidden, match="made with this deployment's secret"):
            registry.register(frame, LOCAL)
    assert registry.instances == []


def test_a_registration_is_taken_once_by_one_router() -> None:
    registry, other = registry_of(), registry_of()
    message = signed(m.REGISTER, replace(SAID, challenge=registry.challenge()))
    registry.register(message, LOCAL)
    for router in (registry, other):  # the second may be the first one, started anew
        with pytest.raises(Forbidden, match="expected a new one of this router"):
            router.register(message, LOCAL)


def test_clocks_that_differ_are_told_of_and_do_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    registry = registry_of()
    register(registry, said(clock=m.Clock.now()))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    clock = m.Clock(time.monotonic() - 500, time.time() - 400)
    session = register(registry, said(instance_id="i2", port=1, clock=clock))
    assert "the clock of instance i2 is 400 s earlier than this machine's" in caplog.text
    instance = registry.available()[1]
    assert instance.clock.monotonic - time.monotonic() == pytest.approx(-500, abs=5)
    clock = m.Clock(time.monotonic() + 900, time.time())
    registry.heartbeat(signed(m.HEARTBEAT, m.Heartbeat(session, 1, LOAD, clock)))
    assert instance.clock.monotonic - time.monotonic() == pytest.approx(900, abs=5)


def test_a_pair_that_exchanges_no_kv_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = registry_of()
    drafting = replace(KV, page_bytes=(512, 512, 768), draft_fingerprint="mtp")
    register(registry, said(instance_id="d", role=DECODE, kv=drafting, port=1))
    register(registry, said(instance_id="other", role=DECODE, kv=KV, served_names=("other",), port=2))
    session = register(registry, said(instance_id="p", role=PREFILL, kv=KV, port=3))
    for number in range(1, 4):
        registry.heartbeat(signed(m.HEARTBEAT, m.Heartbeat(session, number, LOAD, NOW)))
    [line] = [message for message in caplog.messages if "exchanges" in message]
    reason = "draft layers: expected at least 1 as on the decode instance, got 0 on the prefill instance"
    assert line == f"prefill instance p exchanges no KV with d: {reason}"
    register(registry, said(instance_id="q", role=PREFILL, kv=drafting, port=4))
    by_name = {i.instance_id: registry.partners(i) for i in registry.instances}
    assert by_name == {"d": {"p": reason, "q": None}, "other": {}, "p": {"d": reason}, "q": {"d": None}}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_clocks_are_numbers(number: float) -> None:
    registry = registry_of()
    frame = m.PROTOCOL.encode(replace(SAID, challenge=registry.challenge()))
    frame = frame.replace(struct.pack(">d", SAID.clock.monotonic), struct.pack(">d", number))
    with pytest.raises(BadRequest, match="clock: expected finite numbers"):
        registry.register(sealed(frame), LOCAL)


@pytest.mark.parametrize("word", ["", ".", "1.2.3", "0.000000.aa.bb"])
def test_words_of_others_are_no_challenges(word: str) -> None:
    with pytest.raises(Forbidden, match="challenge"):
        register(registry_of(), replace(SAID, challenge=word or "none"))


def test_a_challenge_grows_old(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of()
    word = registry.challenge()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31)
    with pytest.raises(Forbidden, match="challenge"):
        register(registry, replace(SAID, challenge=word))


def test_a_heartbeat_is_heard_once() -> None:
    registry = registry_of()
    session = register(registry)
    first = signed(m.HEARTBEAT, m.Heartbeat(session, 1, LOAD, NOW))
    registry.heartbeat(first)
    registry.heartbeat(signed(m.HEARTBEAT, m.Heartbeat(session, 5, LOAD, NOW)))
    for number in (1, 5):
        with pytest.raises(Forbidden, match="said before"):
            registry.heartbeat(signed(m.HEARTBEAT, m.Heartbeat(session, number, LOAD, NOW)))
    with pytest.raises(Forbidden, match="secret"):  # a heartbeat is no farewell
        registry.deregister(signed(m.HEARTBEAT, m.Heartbeat(session, 6, LOAD, NOW)))


def test_only_this_machine_registers_without_a_secret_of_its_own() -> None:
    with pytest.raises(Forbidden, match="pd_secret"):
        register(registry_of(), host="192.0.2.7")
    registry = registry_of(pd_secret="s" * 16, host="0.0.0.0")
    register(registry, host="192.0.2.7")
    assert str(registry.instances[0].target) == "192.0.2.7:8000"


def test_a_router_says_what_it_has_no_use_for() -> None:
    with pytest.raises(BadRequest, match="role: expected one of prefill, decode, got 'mixed'"):
        register(registry_of(splitwise=True))
    with pytest.raises(BadRequest, match="role: expected one of mixed, prefill, decode, got 'boss'"):
        register(registry_of(), said(role="boss"))
    for frame in (Protocol(2, m.Registration).encode(SAID), b"\x80\x04N."):
        with pytest.raises(BadRequest, match="protocol version 4, got another: frame: expected version 4, got"):
            registry_of().register(sealed(frame), LOCAL)


def test_an_instance_that_registers_again_keeps_its_requests() -> None:
    registry = registry_of()
    session = register(registry)
    known = registry.instances[0]
    known.begin()
    assert register(registry) != session
    assert registry.instances == [known]
    assert known.candidate().load.num_waiting == 1


def test_another_start_at_the_same_address_takes_the_place_of_the_first() -> None:
    registry = registry_of()
    register(registry)
    register(registry, said(instance_id="i2"))
    assert [i.instance_id for i in registry.instances] == ["i2"]


def test_a_silent_instance_gets_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(timeout_silent=3.0)
    session = register(registry)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3.5)
    assert registry.available() == []
    registry.heartbeat(signed(m.HEARTBEAT, m.Heartbeat(session, 1, LOAD, NOW)))
    assert len(registry.available()) == 1
    registry.heartbeat(signed(m.HEARTBEAT, m.Heartbeat(session, 2, InstanceLoad(takes_requests=False), NOW)))
    assert registry.available() == []
