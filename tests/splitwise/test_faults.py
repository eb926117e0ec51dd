"""Instances that die, stop or change their mind, in processes of their own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.disaggregation.transfer.counters import Failure
from fastdeploy_sd.disaggregation.transfer.events import Fetched, FetchFailed
from fastdeploy_sd.errors import DeviceLost, InternalError
from tests.splitwise.decode_process import NUM_ORDERS
from tests.splitwise.instances import (
    CANARY,
    DEADLINE_S,
    Behaviour,
    BytePages,
    PrefillEngine,
    connectors,
    describe,
    has_mooncake,
    holds,
    next_events,
    request,
    settings,
    source_of,
    total,
    wait_for,
)
from tests.splitwise.instances import PROTOCOLS as BUILT_IN

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NEEDS_MOONCAKE = pytest.mark.skipif(not has_mooncake(), reason="needs the extra [rdma] and libibverbs")
PROTOCOLS = (*BUILT_IN, pytest.param("rdma", marks=NEEDS_MOONCAKE))


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module of this folder."""
    command = [sys.executable, "-m", f"tests.splitwise.{arguments[0]}", *arguments[1:]]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@contextmanager
def prefill_process(protocol: str, behaviour: Behaviour) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a prefill instance; yield it and its address."""
    with started("prefill_process", protocol, behaviour) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()


@contextmanager
def decode_instance(protocol: str, silence_s: float = 60.0) -> Iterator[tuple[KvConnector, BytePages]]:
    pages = BytePages(256)
    ours = settings("decode", protocol, silence_s=silence_s, renew_s=0.2, retry_s=0.1)
    connector = KvConnector(ours, describe(), pages)
    try:
        yield connector, pages
    finally:
        connector.close()


def arrives(connector: KvConnector, pages: BytePages, address: str, prompt: int = 3) -> bool:
    """Whether a prompt of 8 blocks comes from there into the last blocks."""
    blocks = list(range(248, 256))
    connector.fetch(request(prompt, 8), source_of(address), 0, blocks, DEADLINE_S)
    (event,) = next_events(connector)
    return isinstance(event, Fetched) and holds(pages, prompt, 0, blocks)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("behaviour", ["nothing", "half"])
def test_a_prefill_instance_is_killed(protocol: str, behaviour: Behaviour) -> None:
    """Before a page came, and in the middle: the orders fail at once, and another instance serves the next ones."""
    with decode_instance(protocol) as (connector, pages):
        with prefill_process(protocol, behaviour) as (process, address):
            blocks = range(8)
            transfer_id = connector.fetch(request(1, 8), source_of(address), 0, blocks, DEADLINE_S)
            assert process.stdout is not None
            assert process.stdout.readline() == "order\n"
            num_bytes = 8 * 512 if behaviour == "half" else 0
            wait_for(lambda: total(connector.counters.received).num_bytes == num_bytes, "pages")
            process.kill()
            (event,) = next_events(connector)
            assert isinstance(event, FetchFailed)
            assert (event.transfer_id, event.failure) == (transfer_id, Failure.LOST)
            assert all(pages.is_canary(b) for b in range(8, 256))
            connector.fetch(request(1, 8), source_of(address), 0, blocks, DEADLINE_S)
            (event,) = next_events(connector)
            assert isinstance(event, FetchFailed)
        with prefill_process(protocol, "all") as (_, address):
            assert arrives(connector, pages, address)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_prefill_instance_is_killed_after_the_transfer(protocol: str) -> None:
    with decode_instance(protocol) as (connector, pages):
        for prompt in (1, 2):
            with prefill_process(protocol, "all") as (process, address):
                assert arrives(connector, pages, address, prompt)
                process.kill()
        assert connector.take_events() == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_prefill_instance_stops_for_a_while(protocol: str) -> None:
    """What it was asked for fails after the time of silence; when it goes on, late pages go nowhere."""
    with decode_instance(protocol, silence_s=1.0) as (connector, pages), prefill_process(protocol, "half") as found:
        process, address = found
        connector.fetch(request(1, 8), source_of(address), 0, range(8), DEADLINE_S)
        wait_for(lambda: total(connector.counters.received).num_bytes == 8 * 512, "pages")
        process.send_signal(signal.SIGSTOP)
        late = connector.fetch(request(2, 8), source_of(address), 0, range(8, 16), DEADLINE_S)
        events = next_events(connector, 2)
        assert [e.failure for e in events if isinstance(e, FetchFailed)] == [Failure.LOST] * 2
        assert late in [e.transfer_id for e in events]
        process.send_signal(signal.SIGCONT)
        with prefill_process(protocol, "all") as (_, other):
            wait_for(lambda: arrives(connector, pages, other), "a transfer from another instance")

        def goes_on() -> bool:
            connector.fetch(request(1, 8), source_of(address), 0, range(16, 24), DEADLINE_S)
            wait_for(lambda: not pages.is_canary(23) or connector.take_events(), "pages, or silence once more")
            return not pages.is_canary(23)

        wait_for(goes_on, "pages from the instance that was stopped")
        assert all(pages.is_canary(b) for b in range(8, 16))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("behaviour", ["nothing", "all"])
def test_a_decode_instance_is_killed(protocol: str, behaviour: Behaviour) -> None:
    """Its orders end when the lease is over, at the latest; everything that was held for it is given back."""
    theirs = BytePages(512)
    prefill = KvConnector(settings("prefill", protocol, lease_s=2.0), describe(), theirs)
    engine = PrefillEngine(prefill, theirs, 8, behaviour)
    try:
        num_files = len(os.listdir("/proc/self/fd"))
        with started("decode_process", protocol, prefill.address) as process:
            engine.serve_until(lambda: engine.num_orders > 0, "orders")
            process.kill()
            engine.finish()
            process.wait(DEADLINE_S)
        if protocol != "rdma":  # Mooncake keeps those of connections that were lost
            engine.serve_until(lambda: len(os.listdir("/proc/self/fd")) <= num_files, "descriptors")
        with decode_instance(protocol) as (connector, pages):
            engine.behaviour = "all"
            connector.fetch(request(4, 8), source_of(prefill.address), 0, range(8), DEADLINE_S)
            assert isinstance(engine.serve(connector)[0], Fetched)
            assert holds(pages, 4, 0, range(8))
    finally:
        prefill.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_decode_instance_that_stops_holds_up_nobody_else(protocol: str) -> None:
    theirs = BytePages(1024)
    prefill = KvConnector(settings("prefill", protocol), describe(), theirs)
    engine = PrefillEngine(prefill, theirs, 8)
    try:
        with started("decode_process", protocol, prefill.address) as process, decode_instance(protocol) as other:
            assert process.stdout is not None
            assert process.stdout.readline() == "ordered\n"
            engine.serve_until(lambda: total(prefill.counters.sent).num_bytes > 0, "pages")
            process.send_signal(signal.SIGSTOP)
            connector, pages = other
            for prompt in range(20, 25):
                connector.fetch(request(prompt, 8), source_of(prefill.address), 0, range(8), DEADLINE_S)
                assert isinstance(engine.serve(connector)[0], Fetched)
                assert holds(pages, prompt, 0, range(8))
            process.send_signal(signal.SIGCONT)
            engine.serve_until(
                lambda: total(prefill.counters.sent).num_transfers == NUM_ORDERS + 5, "the stopped one's"
            )
            assert process.stdout.read() == "right\n" * NUM_ORDERS
    finally:
        prefill.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_after_cancel_no_byte_of_the_pages_changes(protocol: str) -> None:
    """500 orders, each cancelled at another moment; the blocks are marked as soon as cancel has returned."""
    with connectors(protocol, num_blocks=512, window_bytes=4096) as (decode, ours, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 8)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                engine.step()
                stop.wait(0.0005)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            ours.delay_s = 0.0002
            rng = random.Random(1)
            arrived = 0
            for n in range(500):
                blocks = [(n * 8 + i) % 512 for i in range(8)]
                for layer in ours.memory:
                    layer[blocks] = CANARY
                transfer_id = decode.fetch(request(n, 8), source_of(prefill.address), 0, blocks, DEADLINE_S)
                num_bytes = total(decode.counters.received).num_bytes
                if n % 50 == 0:  # in the middle for certain
                    wait_for(lambda: total(decode.counters.received).num_bytes > num_bytes, "a page")  # noqa: B023
                else:
                    stop.wait(rng.random() * 0.02 if n % 5 == 0 else 0.0)
                decode.cancel(transfer_id)
                arrived += any(event.transfer_id == transfer_id for event in decode.take_events())
                for layer in ours.memory:
                    layer[blocks] = n % 251
            assert arrived == 0
            # What is said on one connection is heard in order: behind this one there are no others.
            last = decode.fetch(request(500, 8), source_of(prefill.address), 0, range(416, 424), DEADLINE_S)
            assert [event.transfer_id for event in next_events(decode)] == [last]
            wait_for(lambda: not engine.running, "the end of all orders")
            for n in range(500 - 63, 500):
                blocks = [(n * 8 + i) % 512 for i in range(8)]
                assert all(bool((layer[blocks] == n % 251).all()) for layer in ours.memory)
        finally:
            stop.set()
            thread.join()
        assert np.array_equal(np.sort(engine.free), np.arange(0, 512, 8))


def test_an_order_has_a_deadline() -> None:
    with connectors("tcp") as (decode, ours, prefill, theirs):
        engine, now = PrefillEngine(prefill, theirs, 8, "half"), 100.0
        decode._table._clock = lambda: now
        transfer_id = decode.fetch(request(1, 8), source_of(prefill.address), 0, range(8), 0.5)
        engine.serve_until(lambda: total(decode.counters.received).num_bytes == 8 * 512, "pages")
        now += 0.6
        (event,) = engine.serve(decode)
        assert isinstance(event, FetchFailed)
        text = "16 of 24 pages did not come, and there was no progress for 0.5 seconds"
        assert event == FetchFailed(transfer_id, text, Failure.DEADLINE)
        engine.finish()
        assert engine.cancelled == [transfer_id]
        assert all(ours.is_canary(b) for b in range(8, 256))


def test_an_order_waits_for_its_turn_as_long_as_the_other_side_computes() -> None:
    with connectors("tcp", renew_s=0.01) as (decode, _, prefill, theirs):
        engine, now = PrefillEngine(prefill, theirs, 8, "nothing"), 100.0
        decode._table._clock = lambda: now
        transfer_id = decode.fetch(request(1, 8), source_of(prefill.address), 0, range(8), 60)
        transfer = decode._table._transfers[transfer_id]
        engine.serve_until(lambda: engine.num_orders, "the order")
        for _ in range(5):  # five times as long as it would wait for one that hangs
            now += 59
            prefill.note_step()
            wait_for(lambda: transfer.progress == now, "that the decode instance hears of the step")  # noqa: B023 (called here)
            assert decode.take_events() == []
        now += 61
        (event,) = engine.serve(decode)
        text = "24 of 24 pages did not come, and there was no progress for 60.0 seconds"
        assert event == FetchFailed(transfer_id, text, Failure.DEADLINE)


def test_a_failure_of_the_other_engine_is_told() -> None:
    with connectors("tcp") as (decode, _, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 256)
        ids = [decode.fetch(request(n, 8), source_of(prefill.address), 0, range(8), 60) for n in (1, 2)]
        assert FetchFailed(ids[1], "no blocks", Failure.FAILED) in engine.serve(decode, 2)


def test_pages_that_cannot_be_written_end_the_transfers_but_not_the_connector() -> None:
    with connectors("ipc") as (decode, ours, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 8)
        decode.fetch(request(1, 8), source_of(prefill.address), 0, range(1000, 1008), 60)
        assert isinstance(engine.serve(decode)[0], FetchFailed)
        decode.fetch(request(2, 8), source_of(prefill.address), 0, range(8), 60)
        assert isinstance(engine.serve(decode)[0], Fetched)
        assert holds(ours, 2, 0, range(8))


def test_an_address_where_nobody_listens() -> None:
    with decode_instance("tcp") as (connector, _):
        for _ in range(3):
            connector.fetch(request(1, 1), source_of("tcp://127.0.0.1:1"), 0, [0], DEADLINE_S)
        events = next_events(connector, 3)
        assert [e.failure for e in events if isinstance(e, FetchFailed)] == [Failure.UNREACHABLE] * 3


def test_an_address_that_is_none_fails_its_own_order_only(caplog: pytest.LogCaptureFixture) -> None:
    with connectors("tcp") as (decode, ours, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 8)
        right = decode.fetch(request(1, 8), source_of(prefill.address), 0, range(8), 60)
        wrong = [decode.fetch(request(2, 1), source_of(a), 0, [9], 60) for a in ("no address", "tcp://127.0.0.1", "")]
        events = {event.transfer_id: event for event in engine.serve(decode, 4)}
        assert isinstance(events[right], Fetched)
        assert holds(ours, 1, 0, range(8))
        failed = [events[transfer_id] for transfer_id in wrong]
        assert [e.failure for e in failed if isinstance(e, FetchFailed)] == [Failure.UNREACHABLE] * 3
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_prefill_instance_comes_back_under_its_address(protocol: str) -> None:
    with decode_instance(protocol) as (connector, pages):
        port = 0
        for prompt in (1, 2, 3):
            theirs = BytePages(64)
            prefill = KvConnector(settings("prefill", protocol, port=port), describe(), theirs)
            port = int(prefill.address.rpartition(":")[2])
            try:
                engine = PrefillEngine(prefill, theirs, 8)

                def is_fetched(prompt: int = prompt, address: str = prefill.address) -> bool:
                    """Again until the time between attempts is over."""
                    connector.fetch(request(prompt, 8), source_of(address), 0, range(8), DEADLINE_S)
                    return isinstance(engine.serve(connector)[0], Fetched)  # noqa: B023

                wait_for(is_fetched, "a transfer")
                assert holds(pages, prompt, 0, range(8))
            finally:
                prefill.close()


def num_sockets() -> int:
    return sum(
        os.path.realpath(f"/proc/self/fd/{fd}").rpartition("/")[2].startswith("socket:")
        for fd in os.listdir("/proc/self/fd")
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_connection_that_is_not_used_is_closed_and_made_anew(protocol: str) -> None:
    with connectors(protocol, idle_s=0.2) as (decode, ours, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 8)
        num_open = num_sockets()
        decode.fetch(request(1, 8), source_of(prefill.address), 0, range(8), 60)
        assert isinstance(engine.serve(decode)[0], Fetched)
        engine.serve_until(lambda: num_sockets() <= num_open, "the end of the connection")
        decode.fetch(request(2, 8), source_of(prefill.address), 0, range(8), 60)
        assert isinstance(engine.serve(decode)[0], Fetched)
        assert holds(ours, 2, 0, range(8))


@pytest.mark.parametrize("is_idle", [False, True], ids=["while pages arrive", "while the engine asks"])
def test_a_lost_device_ends_the_engine(is_idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> NoReturn:
        raise DeviceLost("the GPU has failed")

    monkeypatch.setattr(BytePages, "follow_steps" if is_idle else "write", lose)

    def fetch(decode: KvConnector, prefill: KvConnector, theirs: BytePages) -> None:
        decode.fetch(request(1, 8), source_of(prefill.address), 0, range(8), DEADLINE_S)
        PrefillEngine(prefill, theirs, 8).serve(decode)

    with connectors() as (decode, _, prefill, theirs), pytest.raises(InternalError, match="the GPU has failed"):
        fetch(decode, prefill, theirs)
