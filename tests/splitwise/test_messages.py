"""Frames: every message comes back as it was, and no other bytes do anything but raise ProtocolError."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from fastdeploy_sd.disaggregation.transfer import messages as m
from fastdeploy_sd.wire.codec import ProtocolError
from tests.splitwise.instances import describe, request

pytestmark = pytest.mark.slow

ORDER = m.Fetch("ab" * 16, request(3, 4), 1, 3, 2.5)
FROM_DECODE: tuple[m.FromDecode, ...] = (
    m.PeerHello("d0", describe(), ("ipc", "tcp")),
    m.Open("rdma", (m.Receiver(8, 4096, session="10.0.0.1:7671", base=1 << 46),)),
    ORDER,
    m.Cancel("ab" * 16),
    m.Credit(0, (1, 2)),
    m.Renew(("a", "b")),
)
FROM_PREFILL: tuple[m.FromPrefill, ...] = (
    m.Welcome("p0", describe(), ("tcp",), "name"),
    m.PeerRefused("no"),
    m.Opened(),
    m.OpenFailed("no"),
    m.Renewed(3, ("a",)),
    m.Chunks("ab" * 16, 0, 2, (1, 2), (5, 0), ((1 << 64) - 1, 0)),
    m.TransferDone("ab" * 16, (1, 2, 3)),
    m.TransferFailed("ab" * 16, "no"),
)


@pytest.mark.parametrize("message", [f for f in FROM_DECODE if f is not ORDER], ids=lambda f: type(f).__name__)
def test_what_decode_instances_say_comes_back(message: m.FromDecode) -> None:
    assert m.decode_from_decode(m.encode(message)) == message


@pytest.mark.parametrize("message", FROM_PREFILL, ids=lambda f: type(f).__name__)
def test_what_prefill_instances_say_comes_back(message: m.FromPrefill) -> None:
    assert m.decode_from_prefill(m.encode(message)) == message


def test_an_order_comes_back_with_its_request() -> None:
    back = m.decode_from_decode(m.encode(ORDER))
    assert isinstance(back, m.Fetch)
    assert (back.transfer_id, back.first_block, back.num_blocks, back.timeout_s) == ("ab" * 16, 1, 3, 2.5)
    for field in dataclasses.fields(back.request):
        np.testing.assert_equal(getattr(back.request, field.name), getattr(ORDER.request, field.name))


@pytest.mark.parametrize("message", [*FROM_DECODE, *FROM_PREFILL], ids=lambda f: type(f).__name__)
def test_changed_bytes_are_another_message_or_an_error(message: m.FromDecode | m.FromPrefill) -> None:
    """Bytes flipped, cut, doubled and inserted at random; whatever comes of it, nothing but ProtocolError is raised."""
    rng = random.Random(type(message).__name__)
    frame = m.encode(message)
    num_errors = 0
    for _ in range(2000):
        data = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[at : at + 1] = bytes((rng.randrange(256),))
                case 1:
                    del data[at : at + rng.randint(1, 8)]
                case 2:
                    data[at:at] = rng.randbytes(rng.randint(1, 8))
                case 3:
                    data[at:at] = data[at : at + rng.randint(1, 8)]
        for decode in (m.decode_from_decode, m.decode_from_prefill):
            try:
                decode(bytes(data))
            except ProtocolError:
                num_errors += 1
    assert num_errors > 2000, "half of them, at least, go the wrong way"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: m.Receiver(0, 1), "window: expected 1..4096 slots, got 0 of 1 bytes"),
        (lambda: m.Receiver(1, 0), "window: expected 1..4096 slots, got 1 of 0 bytes"),
        (lambda: m.Fetch("", request(1, 1), 0, 1, 1.0), "expected an id and some blocks"),
        (lambda: m.Fetch("x" * 65, request(1, 1), 0, 1, 1.0), "expected an id and some blocks"),
        (lambda: m.Fetch("x", request(1, 1), -1, 1, 1.0), "expected an id and some blocks"),
        (lambda: m.Fetch("x", request(1, 1), 0, 0, 1.0), "expected an id and some blocks"),
        (lambda: m.Fetch("x", request(1, 1), 0, 1, float("nan")), "timeout_s: expected a positive number, got nan"),
        (lambda: m.Chunks("x", 0, 0, (1,), (1, 2), (1,)), "expected as many blocks as slots and checksums"),
        (lambda: m.Chunks("x", 0, 0, (), (), ()), "expected as many blocks as slots and checksums"),
        (lambda: describe(page_bytes=()), "num_layers: expected 1..0, got 2"),
        (lambda: describe(page_bytes=(512, 0, 512)), "page_bytes: expected positive numbers, got 0"),
    ],
)
def test_values_that_mean_nothing(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=f"^{text}$".replace("..", r"\.\.")):
        make()
