"""What no instance of ours would say: refused, counted, and without effect on others or on a page."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_sd.disaggregation.transfer import messages as m
from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.disaggregation.transfer.counters import Failure, Refusal
from fastdeploy_sd.disaggregation.transfer.events import Fetched, FetchFailed, PrefillCancelled, PrefillWanted, Sent
from tests.splitwise.instances import (
    LAYERS,
    BytePages,
    PrefillEngine,
    content,
    describe,
    holds,
    next_events,
    request,
    settings,
    source_of,
    total,
    wait_for,
)
from tests.splitwise.raw_peers import MAX_FRAME_BYTES, RawDecode, RawPrefill

pytestmark = pytest.mark.slow

PICKLE = b"\x80\x04\x95\x12\0\0\0\0\0\0\0}\x94\x8c\x08transfer\x94K\x01s."
GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "pickle": PICKLE,
    "another version": b"\x63" + m.encode(m.Renew(()))[1:],
    "an unknown tag": m.encode(m.Renew(()))[:1] + b"\x91\x63",
    "what only the other side says": m.encode(m.Renewed()),
    "truncated": m.encode(m.Renew(("a", "b")))[:-2],
    "no msgpack": m.encode(m.Renew(()))[:2] + b"\xc1",
    "deep": m.encode(m.Renew(()))[:3] + b"\x91" * 3000,
    "wrong types": m.encode(m.Renew(()))[:3] + b"\x91\x05",
    "an empty order": m.encode(m.Cancel("x")).replace(b"x", b""),
}


@pytest.fixture
def prefill() -> Iterator[KvConnector]:
    pages = BytePages(64)
    connector = KvConnector(settings("prefill", max_message_bytes=MAX_FRAME_BYTES), describe(), pages)
    yield connector
    connector.close()


@pytest.fixture
def raw(prefill: KvConnector) -> Iterator[RawDecode]:
    peer = RawDecode(prefill.address)
    yield peer
    peer.close()


def order(transfer_id: str, num_blocks: int = 2) -> m.Fetch:
    """An order of the first blocks of a prompt of two."""
    return m.Fetch(transfer_id, request(1, 2), 0, num_blocks, 60)


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_and_the_next_order_is_taken(name: str, prefill: KvConnector, raw: RawDecode) -> None:
    raw.open()
    raw.say(GARBAGE[name])
    raw.hear(m.PeerRefused)
    assert prefill.counters.num_refused == {Refusal.MALFORMED: 1}
    raw.say(order("t"))
    (wanted,) = next_events(prefill)
    assert isinstance(wanted, PrefillWanted)


def test_bytes_from_somebody_without_the_secret_change_nothing(prefill: KvConnector, raw: RawDecode) -> None:
    host, port = prefill.address.removeprefix("tcp://").split(":")
    for data in (b"", b"\xff" * 10_000, PICKLE * 1000, b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL" + b"\0" * 48):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(data)
    raw.open()
    assert not prefill.counters.num_refused


def test_too_long_a_frame_ends_the_connection(prefill: KvConnector, raw: RawDecode) -> None:
    raw.open()
    raw.say(bytes(MAX_FRAME_BYTES + 1))
    wait_for(raw.is_lost, "the end of the connection")
    other = RawDecode(prefill.address)
    other.open()
    other.close()


def test_nobody_is_heard_before_hello_nor_twice(prefill: KvConnector, raw: RawDecode) -> None:
    raw.say(order("t"))
    assert raw.hear(m.PeerRefused)[0].reason == "expected Hello first"
    raw.open()
    raw.say(m.PeerHello("again", describe(), ("tcp",)))
    assert raw.hear(m.PeerRefused)[0].reason == "expected one Hello"
    raw.say(m.Open("tcp", (m.Receiver(10, max(LAYERS)),)))
    assert raw.hear(m.OpenFailed)[0].reason == "expected one Open, got another"
    assert prefill.take_events() == []


@pytest.mark.parametrize(
    ("protocol", "receivers", "reason"),
    [
        ("tcp", (), "expected one receiver, got 0"),
        ("tcp", (m.Receiver(10, 100),), "expected slots of a page, got 100 bytes"),
        ("tcp", (m.Receiver(4096, 1 << 30),), "expected a window of at most 8192 bytes"),
        ("ipc", (m.Receiver(10, 800, token="x"),), "expected one of tcp, got 'ipc'"),
        ("smoke", (m.Receiver(10, 800),), "expected one of tcp, got 'smoke'"),
    ],
)
def test_windows_that_do_not_fit(raw: RawDecode, protocol: str, receivers: tuple[m.Receiver, ...], reason: str) -> None:
    raw.say(m.PeerHello("raw", describe(), ("tcp",)))
    raw.hear(m.Welcome)
    raw.say(m.Open(protocol, receivers))
    assert raw.hear(m.OpenFailed)[0].reason == reason


def test_orders_that_do_not_fit(prefill: KvConnector, raw: RawDecode) -> None:
    raw.open()
    raw.say(order("beyond", 3))
    assert raw.hear(m.TransferFailed)[0] == m.TransferFailed(
        "beyond", "expected a new id and at most 2 blocks, got block 2"
    )
    raw.say(order("t"), order("t"), m.Cancel("unknown"))
    prefill.note_step()
    raw.say(m.Renew(("t", "unknown")))
    assert raw.hear(m.Renewed)[0] == m.Renewed(1, ("t",))
    assert [type(e) for e in prefill.take_events()] == [PrefillWanted]
    assert prefill.counters.num_refused == {Refusal.UNEXPECTED: 2}


def test_credit_counts_once(prefill: KvConnector, raw: RawDecode) -> None:
    """A window of two pages: credit that was not lent, or is named twice, makes room for nothing."""
    raw.open(num_slots=2)
    raw.say(order("t"))
    next_events(prefill)
    for layer in range(len(LAYERS)):
        prefill.send("t", layer, 0, [0, 1])
    first, pages = raw.hear(m.Chunks)
    assert (first.layer, first.blocks, [len(page) for page in pages]) == (0, (0, 1), [512, 512])
    raw.say(m.Credit(0, (7,)), m.Credit(1, first.slots), m.Credit(0, (0, 0)))
    raw.say(m.Renew(("t",)))
    raw.hear(m.Renewed)
    assert prefill.counters.num_refused == {Refusal.OUT_OF_BOUNDS: 3}
    assert total(prefill.counters.sent).num_bytes == 2 * 512
    raw.say(m.Credit(0, (first.slots[0],)))
    second, _ = raw.hear(m.Chunks)
    assert (second.layer, second.blocks, second.slots) == (1, (0,), (first.slots[0],))


def test_an_order_that_nobody_renews_ends_and_its_pages_come_free() -> None:
    connector = KvConnector(settings("prefill", lease_s=1.0), describe(), BytePages(64))
    raw = RawDecode(connector.address)
    try:
        raw.open()
        raw.say(order("kept"), order("lost"))
        next_events(connector, 2)

        def renew() -> bool:
            raw.say(m.Renew(("kept",)))
            raw.hear(m.Renewed)
            return connector.counters.num_unsent > 0

        wait_for(renew, "the end of the lease")
        assert next_events(connector, 2) == [PrefillCancelled("lost"), Sent("lost")]
        connector.send("lost", 0, 0, [0, 1])  # too late, and without effect
        connector.send("kept", 0, 0, [0, 1])
        assert raw.hear(m.Chunks)[0].transfer_id == "kept"
    finally:
        raw.close()
        connector.close()


# ---- at a decode instance: one that has the secret sends nonsense ---------------------------------------------------


class Attacked:
    """A decode instance that waits for pages [1, 3) of prompt 5 in its blocks 8 and 9."""

    def __init__(self) -> None:
        self.pages = BytePages(16)
        self.connector = KvConnector(settings("decode"), describe(), self.pages)
        self.raw = RawPrefill()
        self.id = self.connector.fetch(request(5, 3), source_of(self.raw.address), 1, [8, 9], 60)
        assert self.raw.open().transfer_id == self.id

    def refused(self) -> dict[Refusal, int]:
        """What was refused, when everything that was sent has been looked at."""
        self.raw.hear(m.Credit)
        return dict(self.connector.counters.num_refused)

    def send_all(self) -> None:
        for layer in reversed(range(len(LAYERS))):
            for block in (2, 1):
                self.raw.send_page(self.id, 5, layer, block)
        self.raw.say(m.TransferDone(self.id, (1,)))

    def close(self) -> None:
        self.connector.close()
        self.raw.close()


@pytest.fixture
def attacked() -> Iterator[Attacked]:
    made = Attacked()
    yield made
    made.close()


@pytest.mark.parametrize(("layer", "block"), [(0, 0), (0, 3), (3, 1), (-1, 1), (0, -1), (0, 1 << 40), (1 << 40, 1)])
def test_pages_that_were_not_ordered_are_refused(attacked: Attacked, layer: int, block: int) -> None:
    page = content(5, 0, 1, LAYERS[0])
    attacked.raw.say(m.Chunks(attacked.id, 0, layer, (block,), (0,), (1,)), [page])
    attacked.send_all()
    assert next_events(attacked.connector) == [Fetched(attacked.id, (1,))]
    assert attacked.connector.counters.num_refused == {Refusal.OUT_OF_BOUNDS: 1}
    assert holds(attacked.pages, 5, 1, [8, 9])
    assert all(attacked.pages.is_canary(b) for b in range(16) if b not in (8, 9))


def test_a_page_comes_once_and_in_any_order(attacked: Attacked) -> None:
    attacked.raw.send_page(attacked.id, 5, 2, 2)
    attacked.raw.send_page(attacked.id, 5, 2, 2)
    attacked.raw.send_page("0" * 32, 5, 2, 1)
    attacked.send_all()
    assert next_events(attacked.connector) == [Fetched(attacked.id, (1,))]
    assert attacked.connector.counters.num_refused == {Refusal.DUPLICATE: 2, Refusal.UNKNOWN_TRANSFER: 1}
    assert holds(attacked.pages, 5, 1, [8, 9])


@pytest.mark.parametrize("fault", ["flipped", "short", "long", "empty", "of another page"])
def test_a_damaged_page_ends_the_transfer_and_reaches_no_page(attacked: Attacked, fault: str) -> None:
    page = content(5, 0, 1, LAYERS[0])
    page[100] ^= 4
    damaged = {
        "flipped": page,
        "short": page[:-1],
        "long": np.append(page, page[:1]),
        "empty": page[:0],
        "of another page": content(5, 0, 2, LAYERS[0]),
    }[fault]
    attacked.raw.send_page(attacked.id, 5, 0, 1, damaged)
    (event,) = next_events(attacked.connector)
    assert isinstance(event, FetchFailed)
    assert (event.failure, event.transfer_id) == (Failure.DAMAGED, attacked.id)
    attacked.send_all()
    wait_for(lambda: attacked.connector.counters.num_refused[Refusal.UNKNOWN_TRANSFER] == 7, "refusals")
    assert all(attacked.pages.is_canary(b) for b in range(16))
    assert attacked.connector.take_events() == []


def test_an_end_before_all_pages_is_a_failure(attacked: Attacked) -> None:
    attacked.raw.send_page(attacked.id, 5, 0, 1)
    attacked.raw.say(m.TransferDone(attacked.id, (1, 2)))
    (event,) = next_events(attacked.connector)
    assert event == FetchFailed(attacked.id, "5 of 6 pages did not come", Failure.INCOMPLETE)


def test_slots_and_frames_that_do_not_fit(attacked: Attacked) -> None:
    page = content(5, 0, 1, LAYERS[0])
    attacked.raw.say(m.Chunks(attacked.id, 0, 0, (1,), (99,), (1,)), [page])
    attacked.raw.say(m.Chunks(attacked.id, 1, 0, (1,), (0,), (1,)), [page])
    attacked.raw.say(m.Chunks(attacked.id, 0, 0, (1, 2), (0, 1), (1, 1)), [page])
    attacked.raw.say(m.Chunks(attacked.id, 0, 0, (1,), (0,), (1,)))
    attacked.send_all()
    assert next_events(attacked.connector) == [Fetched(attacked.id, (1,))]
    assert attacked.connector.counters.num_refused == {Refusal.OUT_OF_BOUNDS: 4}


@pytest.mark.parametrize("name", [n for n in GARBAGE if n not in ("nothing", "what only the other side says")])
def test_garbage_from_a_prefill_instance_ends_its_connection_only(attacked: Attacked, name: str) -> None:
    attacked.raw.say(GARBAGE[name])
    (event,) = next_events(attacked.connector)
    assert isinstance(event, FetchFailed)
    assert event.failure is Failure.LOST
    theirs = BytePages(64)
    prefill = KvConnector(settings("prefill"), describe(), theirs)
    try:
        engine = PrefillEngine(prefill, theirs, 8)
        attacked.connector.fetch(request(7, 2), source_of(prefill.address), 0, [1, 2], 60)
        engine.serve(attacked.connector)
        assert holds(attacked.pages, 7, 0, [1, 2])
    finally:
        prefill.close()
