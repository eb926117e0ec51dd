"""The sockets between ranks: frames arrive whole and in order, and no rank waits for a peer that is gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from fastdeploy_sd.distributed.link import LinkClosedError, RankLink

pytestmark = pytest.mark.slow

WAIT_S = 120.0


@pytest.fixture
def ends() -> Iterator[tuple[RankLink, RankLink]]:
    ours, theirs = RankLink.pair()
    other = RankLink(theirs)
    with contextlib.closing(ours), contextlib.closing(other):
        yield ours, other


def test_frames_of_any_length_arrive_whole_and_in_order(ends: tuple[RankLink, RankLink]) -> None:
    ours, theirs = ends
    frames = [bytes([n % 256]) * length for n, length in enumerate((0, 1, 7, 100_000, 5_000_000, 0, 3))]

    def send() -> None:
        for frame in frames:
            ours.send(frame)

    sender = threading.Thread(target=send)
    sender.start()
    assert [theirs.receive() for _ in frames] == frames
    sender.join(WAIT_S)
    theirs.send(b"answer")
    assert ours.receive() == b"answer"


def test_a_closed_end_is_an_error_at_the_other(ends: tuple[RankLink, RankLink]) -> None:
    ours, theirs = ends
    ours.send(b"last words")
    ours.shut()
    assert theirs.receive() == b"last words"
    with pytest.raises(LinkClosedError):
        theirs.receive()
    with pytest.raises(LinkClosedError):
        theirs.send(b"anybody there?")


def test_what_has_arrived_is_read_from_a_closed_link(ends: tuple[RankLink, RankLink]) -> None:
    ours, theirs = ends
    theirs.send(b"last words")
    theirs.shut()
    ours.shut()
    assert ours.leftover() == b"last words"
    assert ours.leftover() is None


def test_who_waits_is_woken_by_shut(ends: tuple[RankLink, RankLink]) -> None:
    ours, _ = ends
    errors: list[Exception] = []

    def receive() -> None:
        try:
            ours.receive()
        except LinkClosedError as error:
            errors.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    ours.shut()
    waiting.join(WAIT_S)
    assert len(errors) == 1
