"""LoRA adapters in the engine: places that requests wait for, names that come and go, and what is not shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.engine.adapters import AdapterRegistry, AdapterSlots
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.errors import BadRequest, CheckpointError, ConfigError, NotFound
from fastdeploy_sd.types import Adapter, AdapterSource, FinishReason, Request
from tests.doubles.bench import Bench
from tests.doubles.engines import toy_config, toy_request
from tests.doubles.toy_adapters import ToyAdapters, adapter_of, digest_of, with_adapters


class AdaptedBench(Bench):
    """A bench whose engine begins with the adapters x, y and z."""

    def __init__(self, num_slots: int, **config: Any) -> None:
        super().__init__(info={"num_adapter_slots": num_slots}, **config)
        self.executor.adapters = self.files = ToyAdapters()
        self.engine = Engine(with_adapters(toy_config(**config), "x", "y", "z"), self.executor)


def asked(name: str, adapter: str, max_tokens: int = 8) -> Request:
    request = toy_request(name, [5, 6, 7, 8, 9], max_tokens)
    return replace(request, adapter=adapter_of(adapter) if adapter else None)


def of(client: str, request: Request) -> Request:
    return replace(request, client=client)


def finish_with_arrivals(bench: Bench, arrivals: Callable[[int], list[Request]]) -> None:
    """Finish requests, before each step of which others arrive; "y" must not wait for long."""
    for i in range(1, 40):
        bench.submit(*arrivals(i))
        bench.step()
        if "y" in bench.transcript.last:
            break
    assert "y" in bench.transcript.last
    assert i < 10
    bench.finish()


def loads(bench: Bench) -> list[tuple[int, str]]:
    """The places that plans have filled, in order."""
    return [(one.slot, one.source.adapter.name) for plan in bench.plans for one in plan.adapter_loads]


def test_a_request_waits_until_a_place_is_free_and_the_oldest_is_taken() -> None:
    bench = AdaptedBench(2)
    requests = asked("x", "x", 3), asked("y", "y", 9), asked("z", "z", 3), asked("more", "y", 3), asked("base", "", 2)
    bench.submit(*requests)
    bench.step()
    assert bench.plans[-1].request_ids == ("x", "y", "base"), "z waits, and none with an adapter overtakes it"
    stats = bench.engine.stats()
    assert stats.num_running_by_adapter == {"x": 1, "y": 1}
    assert stats.num_waiting_by_adapter == {"z": 1, "y": 1}
    transcript = bench.finish()
    assert loads(bench) == [(0, "x"), (1, "y"), (0, "z")]
    for request in requests:
        assert transcript.token_ids[request.request_id] == bench.executor.model.generate(request)


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_no_adapter_waits_for_ever_while_others_keep_coming(policy: str) -> None:
    bench = AdaptedBench(1, policy=policy, max_num_seqs=8)
    bench.submit(asked("x0", "x", 4))
    bench.step()
    bench.submit(asked("y", "y", 2))
    finish_with_arrivals(bench, lambda i: [asked(f"x{i}", "x", 4)])


@pytest.mark.parametrize("others", [{"b": "x"}, {"b": "x", "c": "z"}])
def test_no_adapter_waits_for_ever_for_those_of_other_clients(others: dict[str, str]) -> None:
    """These always have fewer seats, as their requests come one at a time."""
    bench = AdaptedBench(1, policy="fair", max_num_seqs=8)
    bench.submit(of("a", asked("long", "", 60)), of("b", asked("first", "x", 4)))
    bench.step()
    bench.submit(of("a", asked("y", "y", 2)))
    finish_with_arrivals(
        bench, lambda i: [of(client, asked(f"{adapter}{i}", adapter, 4)) for client, adapter in others.items()]
    )


def test_a_place_keeps_its_adapter_while_nobody_needs_it() -> None:
    bench = AdaptedBench(2)
    for i, name in enumerate("xyxyzyx"):
        bench.submit(asked(f"{i}", name, 2))
        bench.finish()
    assert loads(bench) == [(0, "x"), (1, "y"), (0, "z"), (0, "x")]


def test_a_request_whose_adapter_is_read_keeps_no_other_waiting() -> None:
    """Whether these have none, another one, or need the only other place."""
    bench = AdaptedBench(2)
    bench.files.slow.add("y")
    requests = asked("y", "y", 4), asked("too", "y", 4), asked("x", "x", 3), asked("base", "", 20), asked("z", "z", 5)
    bench.submit(*requests)
    while bench.engine.stats().num_finished["length"] < len(requests) - 2:
        bench.step()
    assert loads(bench) == [(1, "x"), (1, "z")]
    assert not {"y", "too"} & {name for plan in bench.plans for name in plan.request_ids}
    assert bench.engine.step() == []
    assert bench.engine.is_stalled
    bench.files.end_reading("y")
    transcript = bench.finish()
    assert loads(bench)[2:] == [(0, "y")]
    for request in requests:
        assert transcript.token_ids[request.request_id] == bench.executor.model.generate(request)


def test_a_place_whose_request_ends_while_its_adapter_is_read_goes_to_another() -> None:
    bench = AdaptedBench(1)
    bench.files.slow |= {"x", "y"}
    bench.submit(asked("x", "x", 4))
    bench.step()
    bench.engine.abort(["x"], FinishReason.ABORT)
    bench.submit(asked("y", "y", 4))
    bench.step()
    bench.files.end_reading("x")
    bench.step()
    assert loads(bench) == []
    bench.files.end_reading("y")
    bench.finish()
    assert loads(bench) == [(0, "y")]


def test_an_unloaded_adapter_takes_no_new_requests_and_keeps_those_it_has() -> None:
    bench = AdaptedBench(1)
    bench.submit(asked("runs", "x", 6), asked("waits", "x", 6))
    bench.step()
    bench.engine.adapters.unload("x")
    with pytest.raises(NotFound, match="model: expected an adapter that is loaded here, got 'x'") as caught:
        bench.submit(asked("late", "x"))
    assert caught.value.code == "adapter_not_loaded"
    transcript = bench.finish()
    assert transcript.token_ids["waits"] == bench.executor.model.generate(asked("waits", "x", 6))
    assert [source.adapter.name for source in bench.engine.model_info.adapters] == ["y", "z"]


def test_names_of_one_digest_are_one_adapter() -> None:
    bench = AdaptedBench(1)
    bench.engine.adapters.load("also", Path("x"))
    both = Adapter("also", adapter_of("x").digest)
    bench.submit(asked("a", "x"), replace(asked("b", "x"), adapter=both))
    bench.step()
    assert bench.plans[-1].request_ids == ("a", "b")
    bench.finish()
    assert len(loads(bench)) == 1


def test_prefixes_are_not_shared_whatever_the_salt() -> None:
    bench = AdaptedBench(2, max_num_batched_tokens=64)
    prompt = list(range(3, 25))
    digest = adapter_of("x").digest
    salts = ["", f"{digest}: ", f"target KV only, {digest}: ", f", {digest}: "]
    for i, salt in enumerate(salts):
        bench.submit(toy_request(f"base {i}", prompt, 2, cache_salt=salt))
        bench.finish()
    assert bench.engine.stats().num_prefix_hits == 0
    bench.submit(replace(toy_request("x", prompt, 2), adapter=adapter_of("x")))
    bench.finish()
    assert bench.engine.stats().num_prefix_hits == 0
    bench.submit(replace(toy_request("again", prompt, 2), adapter=adapter_of("x")))
    bench.finish()
    assert bench.engine.stats().num_prefix_hits == 1


def test_a_failed_request_has_its_adapter_read_again_when_nobody_uses_it() -> None:
    bench = AdaptedBench(1)
    bench.executor._failures["bad"] = 1
    bench.submit(asked("good", "x", 5), asked("bad", "x", 5))
    bench.finish()
    bench.submit(asked("next", "x", 2))
    bench.finish()
    assert loads(bench) == [(0, "x"), (0, "x")]


def test_what_cannot_be_loaded_is_refused() -> None:
    registry = AdapterRegistry(LoraConfig(True), ToyAdapters({"there": "a"}), ("m",))
    registry.load("one", Path("there"))
    for name, wanted in (
        ("one", "not in use, got 'one'"), ("m", "not in use, got 'm'"), ("", "1..128 printable"), ("a b", "1..128"),
        ("a=b", "1..128"), ("x" * 129, "1..128"), ("\x07", "1..128"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=wanted):
            registry.load(name, Path("there"))
    with pytest.raises(CheckpointError, match="missing: expected adapter_config"):
        registry.load("two", Path("missing"))
    with pytest.raises(NotFound, match="lora_name: expected a loaded adapter, got 'two'"):
        registry.unload("two")
    with pytest.raises(BadRequest, match="expected a server with enable_lora"):
        AdapterRegistry(LoraConfig(), None).load("one", Path("there"))
    with pytest.raises(ConfigError, match="lora_modules: one: missing: expected"):
        AdapterRegistry(LoraConfig(None, ("one=missing",)), ToyAdapters({}))
    for number in range(255):
        registry.load(f"n{number}", Path("there"))
    with pytest.raises(BadRequest, match="at most 256 adapters"):
        registry.load("more", Path("there"))


def test_an_adapter_of_another_digest_is_another() -> None:
    registry = AdapterRegistry(LoraConfig(True), ToyAdapters({"there": "a"}))
    registry.load("one", Path("there"))
    assert registry.find(None) is None
    assert registry.find(Adapter("any name", digest_of("a"))) == registry.known[0]
    with pytest.raises(NotFound):
        registry.find(Adapter("one", digest_of("b")))


def test_books_of_places_that_are_wrong_are_noticed() -> None:
    class User:
        adapter: AdapterSource | None = AdapterSource(adapter_of("x"), "x")
        adapter_slot = -1

    slots, user = AdapterSlots(2), User()
    assert slots.begin(user)
    slots.verify([0])
    for wrong in ([], [1], [0, 0]):
        with pytest.raises(AssertionError, match="counted wrongly"):
            slots.verify(wrong)
