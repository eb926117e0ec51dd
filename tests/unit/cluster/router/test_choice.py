"""Where requests go: by load, by what was seen of their prompt, by role, model and fingerprint."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fastdeploy_sd.cluster.membership import DECODE, PREFILL, InstanceLoad
from fastdeploy_sd.cluster.router.choice import Chooser
from fastdeploy_sd.cluster.router.instance import Circuit, Instance
from fastdeploy_sd.errors import NotFound
from fastdeploy_sd.types import Adapter, KvDescription
from tests.unit.cluster.router.registrations import KV, NOW, instance

PROMPT = json.dumps({"model": "toy", "prompt": "x" * 2000}).encode()


def chooser_of(*instances: Instance) -> Chooser:
    return Chooser(lambda: [i for i in instances if i.may_take(3.0)], lambda: instances)


def load(num_running: int, capacity: int = 8) -> InstanceLoad:
    return InstanceLoad(num_running=num_running, max_num_seqs=capacity)


def chosen(chooser: Chooser, body: bytes = b"{}") -> str:
    placement = chooser.choose(chooser.hints(body))
    assert placement is not None
    return placement.instance.instance_id


def test_nobody_is_chosen_where_nobody_is() -> None:
    assert chooser_of().choose(chooser_of().hints(b"{}")) is None
    refusing = instance("a", load=InstanceLoad(takes_requests=False))
    prefill = instance("p", 1, role=PREFILL, kv_address="tcp://:5000")
    chooser = chooser_of(refusing, prefill)
    assert chooser.choose(chooser.hints(b"{}")) is None


def test_the_emptiest_gets_the_request() -> None:
    chooser = chooser_of(
        instance("a", load=load(6)), instance("b", 1, load=load(2)), instance("c", 2, load=load(8, 64))
    )
    assert {chosen(chooser) for _ in range(20)} == {"c"}  # an eighth of what it could do


def test_what_was_given_since_the_last_report_counts() -> None:
    instances = [instance(name, i, load=load(0, 4)) for i, name in enumerate("abc")]
    chooser = chooser_of(*instances)
    given: Counter[str] = Counter()
    for _ in range(12):
        placement = chooser.choose(chooser.hints(b"{}"))
        assert placement is not None
        placement.instance.begin()
        given[placement.instance.instance_id] += 1
    assert given == {"a": 4, "b": 4, "c": 4}


def test_an_estimate_is_what_was_said_and_what_came_after() -> None:
    known = instance("a", load=load(2))
    assert known.candidate().load.num_waiting == 0
    for _ in range(3):
        known.begin()
    assert known.candidate().load.num_waiting == 3
    known.report(load(4), NOW)  # another router's, and ours
    assert (known.candidate().load.num_running, known.candidate().load.num_waiting) == (4, 0)
    known.begin()
    assert known.candidate().load.num_waiting == 1
    known.report(load(0), NOW)  # it has not got to them yet
    assert known.candidate().load.num_waiting == 4
    for _ in range(4):
        known.end()
    assert known.candidate().load.num_waiting == 0


def test_a_prompt_goes_where_it_was_seen_unless_that_is_fuller() -> None:
    first, other = instance("a", load=load(0)), instance("b", 1, load=load(0))
    chooser = chooser_of(first, other)
    home = chosen(chooser, PROMPT)
    seen, unseen = (first, other) if home == "a" else (other, first)
    seen.report(load(2), NOW)
    assert {chosen(chooser, PROMPT) for _ in range(20)} == {home}
    seen.report(load(6), NOW)
    assert chosen(chooser, PROMPT) == unseen.instance_id


def test_one_that_failed_on_a_request_gets_it_again_only_when_alone() -> None:
    chooser = chooser_of(instance("a", load=load(0)), instance("b", 1, load=load(7)))
    hints = chooser.hints(b"{}")
    hints.tried = {"a"}
    placement = chooser.choose(hints)
    assert placement is not None
    assert placement.instance.instance_id == "b"
    hints.tried = {"a", "b"}
    assert chooser.choose(hints) is not None


def test_a_stream_goes_on_where_bytes_are_the_same_only() -> None:
    other = instance("b", 1, fingerprint="y", load=load(0))
    chooser = chooser_of(instance("a", fingerprint="x", load=load(7)), other)
    hints = chooser.hints(b"{}")
    hints.fingerprint = "x"
    placement = chooser.choose(hints)
    assert placement is not None
    assert placement.instance.instance_id == "a"
    hints.fingerprint = "z"
    assert chooser.choose(hints) is None


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("big", {"b"}),
        ("also:latest", {"b"}),
        ("small", {"a"}),
        (None, {"a", "b"}),
        ("default", {"a", "b"}),
        (5, {"a", "b"}),
    ],
)
def test_a_model_goes_to_who_serves_it(model: object, expected: set[str]) -> None:
    chooser = chooser_of(instance("a", served_names=("small",)), instance("b", 1, served_names=("big", "also")))
    body = json.dumps({"model": model}).encode()
    assert {chosen(chooser, body) for _ in range(60)} == expected


def test_an_unknown_model_is_an_error_that_lists_all_models() -> None:
    """Also those of instances that are not available now: these are known, and have no place."""
    busy = instance("c", 2, served_names=("third",), load=InstanceLoad(takes_requests=False))
    chooser = chooser_of(instance("a", served_names=("small",)), instance("b", 1, served_names=("big", "also")), busy)
    with pytest.raises(NotFound) as caught:
        chooser.hints(b'{"model": "none"}')
    assert caught.value.message == "model: expected one of 'small', 'big', 'also', 'third', got 'none'"
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert chooser.choose(chooser.hints(b'{"model": "third"}')) is None


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\xff", b"[]", b"1"])
def test_what_is_no_body_goes_anywhere(content: bytes) -> None:
    """The instance has the words for it."""
    chosen(chooser_of(instance("a", served_names=("small",)), instance("b", 1, served_names=("big",))), content)


def test_prefill_and_decode_are_chosen_apart() -> None:
    decode = [instance(name, i, role=DECODE, kv=KV, load=load(n)) for i, (name, n) in enumerate([("d1", 5), ("d2", 1)])]
    prefill = [
        instance(name, i, role=PREFILL, kv_address=f"tcp://:{i}", kv=KV, load=load(n))
        for i, (name, n) in enumerate([("p1", 1), ("p2", 5)], 5)
    ]
    chooser = chooser_of(*decode, *prefill)
    placement = chooser.choose(chooser.hints(PROMPT))
    assert placement is not None
    assert placement.source is not None
    assert placement.source.kv_source is not None
    assert (placement.instance.instance_id, placement.source.instance_id) == ("d2", "p1")
    assert placement.source.kv_source.address == "tcp://127.0.0.1:5"
    prefill[0].report(InstanceLoad(takes_requests=False), NOW)
    prefill[1].report(InstanceLoad(takes_requests=False), NOW)
    placement = chooser.choose(chooser.hints(PROMPT))
    assert placement is not None
    assert placement.source is None  # it computes the prompt itself
    mixed = chooser_of(instance("m"), *prefill).choose(chooser.hints(PROMPT))
    assert mixed is not None
    assert mixed.source is None


DRAFTING = replace(KV, page_bytes=(512, 512, 768), draft_fingerprint="mtp")


@pytest.mark.parametrize(
    ("decode", "prefill", "fits"),
    [
        (KV, KV, True),
        (KV, DRAFTING, True),  # its draft layers are not sent
        (DRAFTING, DRAFTING, True),
        (DRAFTING, KV, False),
        (DRAFTING, replace(DRAFTING, draft_fingerprint="other"), False),
        (KV, replace(KV, model_fingerprint="another model"), False),
        (KV, None, False),
    ],
)
def test_a_decode_instance_gets_kv_of_prefill_instances_that_fit(
    decode: KvDescription, prefill: KvDescription | None, fits: bool
) -> None:
    """Where none fits it computes prompts itself, however many others there are."""
    source = instance("p", 1, role=PREFILL, kv_address="tcp://:5", kv=prefill)
    stranger = instance("q", 2, role=PREFILL, kv_address="tcp://:6", kv=replace(KV, block_size=8))
    chooser = chooser_of(instance("d", role=DECODE, kv=decode), source, stranger)
    for _ in range(10):
        placement = chooser.choose(chooser.hints(PROMPT))
        assert placement is not None
        assert placement.source is (source if fits else None)


def test_a_circuit_opens_after_failures_in_a_row_and_lets_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    circuit = Circuit()
    for is_failure in (True, True, False, True, True):
        circuit.begin()
        circuit.note(is_failure)
    assert not circuit.is_open
    circuit.note(True)
    assert circuit.is_open
    now += 2.1
    assert not circuit.is_open
    circuit.begin()
    assert circuit.is_open  # one tries, the others wait for what it comes to
    circuit.leave()
    assert not circuit.is_open
    circuit.begin()
    circuit.note(True)
    now += 2.1
    assert circuit.is_open  # longer than the first time
    now += 2.1
    circuit.begin()
    circuit.note(False)
    assert not circuit.is_open
    for _ in range(100):
        circuit.note(True)
    now += 60.1
    assert not circuit.is_open


def test_requests_for_an_adapter_go_to_who_has_it_and_so_do_orders_for_their_prompts() -> None:
    own, other = Adapter("tuned", "aa" * 16), Adapter("tuned", "bb" * 16)
    names: dict[str, Any] = {"served_names": ("toy", "tuned")}
    decode = instance("d", role=DECODE, kv=KV, adapters=(own,), **names)
    bare = instance("b", 1, role=DECODE, kv=KV)
    sources = [
        instance(name, i, role=PREFILL, kv=KV, kv_address="tcp://:5000", adapters=adapters)
        for i, (name, adapters) in enumerate({"p": (own,), "q": (other,), "r": ()}.items(), 2)
    ]
    chooser = chooser_of(decode, bare, *sources)
    for _ in range(30):
        placement = chooser.choose(chooser.hints(b'{"model": "tuned"}'))
        assert placement is not None
        assert placement.source is not None
        assert (placement.instance.instance_id, placement.source.instance_id) == ("d", "p")
    with pytest.raises(NotFound):
        chooser.hints(b'{"model": "missing"}')
