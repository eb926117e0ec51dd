"""Frames: read where they were put, signed and whole, and refused otherwise."""

from __future__ import annotations

import pytest

from fastdeploy_sd.cluster.redis.frames import PROTOCOL, Answers, Ending, Item, Orders, RequestFailure
from fastdeploy_sd.engine.ipc.messages import WireError
from fastdeploy_sd.errors import Overloaded
from fastdeploy_sd.types import FinishReason, RequestOutput
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.protocol import Protocol, SignedCodec

pytestmark = pytest.mark.slow

CODEC = SignedCodec(PROTOCOL, b"k" * 32, "topic", 10_000)
PLACE = "results.me"
ANSWERS = Answers(
    "there",
    (Item(3, 0, RequestOutput("", (1, 2))), Item(4, 7, RequestOutput("", (), finish_reason=FinishReason.STOP))),
    (RequestFailure(5, WireError.of(Overloaded("full", retry_after_s=2))),),
    beat=9,
    unknown=(6,),
)
FRAME = CODEC.encode(PLACE, ANSWERS)
PICKLE = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."


def test_a_message_comes_as_it_went() -> None:
    assert CODEC.decode(PLACE, Answers, FRAME) == ANSWERS


@pytest.mark.parametrize("position", range(0, len(FRAME), 7))
def test_a_changed_bit_is_refused(position: int) -> None:
    changed = bytearray(FRAME)
    changed[position] ^= 0x10
    with pytest.raises(ProtocolError):
        CODEC.decode(PLACE, Answers, bytes(changed))


@pytest.mark.parametrize("frame", [b"", b"\x01", FRAME[:-1], FRAME[:20], FRAME + b"\0", PICKLE, b"\x01" + PICKLE])
def test_other_bytes_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        CODEC.decode(PLACE, Answers, frame)


def test_a_frame_counts_at_its_place_only() -> None:
    for codec, place in (
        (CODEC, "results.you"),
        (SignedCodec(PROTOCOL, b"k" * 32, "other", 10_000), PLACE),
        (SignedCodec(PROTOCOL, b"l" * 32, "topic", 10_000), PLACE),
    ):
        with pytest.raises(ProtocolError, match="expected the signature of this deployment's secret"):
            codec.decode(place, Answers, FRAME)


def test_another_message_or_version_is_named() -> None:
    with pytest.raises(ProtocolError, match="expected a list that starts with a known message tag"):
        CODEC.decode(PLACE, Orders, FRAME)
    newer = SignedCodec(Protocol(PROTOCOL.version + 1, Answers), b"k" * 32, "topic", 10_000)
    with pytest.raises(ProtocolError, match=f"expected version {PROTOCOL.version}, got"):
        CODEC.decode(PLACE, Answers, newer.encode(PLACE, ANSWERS))


def test_lengths_are_bounded_both_ways() -> None:
    small = SignedCodec(PROTOCOL, b"k" * 32, "topic", len(FRAME) - 1)
    with pytest.raises(ProtocolError, match=f"expected at most {len(FRAME) - 1} bytes, got {len(FRAME)}"):
        small.encode(PLACE, ANSWERS)
    with pytest.raises(ProtocolError, match=f"expected a frame of at most {len(FRAME) - 1} bytes"):
        small.decode(PLACE, Answers, FRAME)


def test_a_request_ends_by_abort_or_stop() -> None:
    with pytest.raises(ValueError, match="expected the reason abort or stop, got length"):
        Ending(1, FinishReason.LENGTH)
