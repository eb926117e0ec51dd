"""Notes in streams: taken out byte for byte wherever the stream is cut, and summed up to its progress."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.cluster.route import ChoiceProgress, Progress
from fastdeploy_sd.cluster.stream_metadata import (
    COUNTED_NOTE,
    ENDED_NOTE,
    FAILED_NOTE,
    EventSplitter,
    ResumeState,
    begun_note,
    shown_note,
    together_note,
)
from fastdeploy_sd.errors import InternalError

EVENTS = [
    begun_note("cmpl-1", 7, [3, 1 << 62], 2) + shown_note(0, [5], False, 16) + 'data: {"a":"\u20ac"}\n\n',
    shown_note(1, [7, 8], False, 0) + "data: {}\n\n",
    shown_note(0, [6], True, 99) + "data: {}\n\n",
    COUNTED_NOTE + "data: {}\n\n",
    "data: [DONE]\n\n",
]
STREAM = "".join(EVENTS).encode("utf-8")


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    splitter, record, relayed = EventSplitter(), ResumeState(), b""
    borders = [0, *sorted(cuts), len(STREAM)]
    for i in range(len(borders) - 1):
        for event in splitter.feed(STREAM[borders[i] : borders[i + 1]]):
            assert not record.take(event)
            relayed += event.data
    assert relayed.decode("utf-8") == 'data: {"a":"\u20ac"}\n\ndata: {}\n\ndata: {}\n\ndata: {}\n\ndata: [DONE]\n\n'
    choices = (ChoiceProgress((5, 6), True, 16), ChoiceProgress((7, 8), False, 0))
    assert record.progress == Progress("cmpl-1", 7, (3, 1 << 62), choices, is_counted=True, num_events=5)


@given(st.lists(st.integers(0, 400), max_size=5))
def test_lines_are_events_too(cuts: list[int]) -> None:
    """Then each note in front of one is a line of its own."""
    begin = begun_note("o1", 7, [3], 1) + shown_note(0, [5], False, 0) + '{"a":1}\n'
    stream = (begin + shown_note(0, [6], True, 0) + together_note(2) + ENDED_NOTE + "{}\n{}\n").encode()
    splitter, record, relayed = EventSplitter(b"\n"), ResumeState(), list[bytes]()
    borders = [0, *sorted(cuts), len(stream)]
    for i in range(len(borders) - 1):
        for event in splitter.feed(stream[borders[i] : borders[i + 1]]):
            assert not record.take(event)
            relayed.append(event.data)
    assert relayed == [b'{"a":1}\n', b"{}\n{}\n"]
    assert record.is_ended
    assert record.progress == Progress("o1", 7, (3,), (ChoiceProgress((5, 6), True, 0),), num_events=3)


def test_half_an_event_counts_for_nothing() -> None:
    splitter, record = EventSplitter(), ResumeState()
    for event in splitter.feed(STREAM[: len(EVENTS[0].encode()) + 30]):
        record.take(event)
    progress = record.progress
    assert progress is not None
    assert progress.choices == (ChoiceProgress((5,), False, 16), ChoiceProgress())


@given(st.integers(0, 200))
def test_events_that_belong_together_are_shown_together(cut: int) -> None:
    begin = begun_note("resp_1", 7, [3], 1) + shown_note(0, [5], False, 0) + together_note(2)
    parts = [begin + "event: a\ndata: {}\n\nevent: b\ndata: {}\n\n", shown_note(0, [6], True, 0), ENDED_NOTE]
    stream = ("".join(parts) + "event: c\ndata: {}\n\n").encode()
    splitter, record, taken = EventSplitter(), ResumeState(), []
    for piece in (stream[:cut], stream[cut:]):
        for event in splitter.feed(piece):
            assert not record.take(event)
            taken.append((event.data.count(b"event: "), record.is_ended))
    assert taken == [(2, False), (1, True)]
    assert record.progress == Progress("resp_1", 7, (3,), (ChoiceProgress((5, 6), True, 0),), num_events=3)


def test_a_failure_is_told_apart() -> None:
    events = list(EventSplitter().feed((FAILED_NOTE + 'data: {"error":{}}\n\ndata: {"error":{}}\n\n').encode()))
    assert [ResumeState().take(event) for event in events] == [True, False]


@pytest.mark.parametrize(
    "line",
    [
        "shown [5,[1],false,0]",
        "shown {}",
        "shown [0,[1]]",
        "begun [1]",
        "begun 1",
        "shown [null,1,1,1]",
        "logprobs [0,[[1]]]",
        "logprobs [0,5]",
    ],
)
def test_notes_of_another_form_are_an_error_of_ours(line: str) -> None:
    (event,) = EventSplitter().feed(f": fdsd {line}\ndata: x\n\n".encode())
    with pytest.raises(InternalError, match="note of an unknown form"):
        ResumeState().take(event)


def test_a_number_of_events_that_is_none_is_an_error_of_ours() -> None:
    with pytest.raises(InternalError, match="note of an unknown form"):
        list(EventSplitter().feed(b": fdsd together [2]\ndata: x\n\n"))


def test_notes_that_are_no_json_are_an_error_of_ours() -> None:
    with pytest.raises(InternalError, match="not JSON"):
        list(EventSplitter().feed(b": fdsd shown [\xff\ndata: x\n\n"))


def test_comments_of_others_are_relayed() -> None:
    (event,) = EventSplitter().feed(b": keep-alive\ndata: x\n\n")
    assert (event.data, event.notes) == (b": keep-alive\ndata: x\n\n", ())
