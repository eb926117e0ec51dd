r"""What an instance writes into a stream for the router that asked for it: lines in front of an event's data.

    : fdsd begun ["cmpl-1",1700000000,[7],2,""] id, time, seeds of the prompts, number of choices, digest of
                                                the adapter; once, in front
    : fdsd shown [0,[17,4],false,0]             of the event with what it shows: choice, its new tokens, whether it has
    data: {"id":"cmpl-1",...}                   ended, prompt tokens from the cache
    : fdsd logprobs [0,[[17,-0.5,1,[],[]],...]] those of its new tokens, where a later event repeats them
    : fdsd together 5                           this event and the next four are shown together or not at all
    : fdsd ended null                           they are the last of the stream, which has no [DONE]
    : fdsd counted null                         the event is the stream's usage
    : fdsd failed null                          the event is an error of the instance, not of the request

The router takes these lines out, so that a client gets everything else byte for byte. Knows no socket.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from fastdeploy_sd.cluster.route import ChoiceProgress, Progress
from fastdeploy_sd.errors import InternalError
from fastdeploy_sd.types import TokenLogprob

_PREFIX = ": fdsd "
_RAW_PREFIX = _PREFIX.encode("ascii")
BEGUN, SHOWN, TOGETHER, ENDED, COUNTED, FAILED = "begun", "shown", "together", "ended", "counted", "failed"
LOGPROBS = "logprobs"


def begun_note(job_id: str, created: int, seeds: Sequence[int], num_choices: int, adapter_digest: str = "") -> str:
    """Return the line in front of a stream's first event."""
    return _line(BEGUN, [job_id, created, list(seeds), num_choices, adapter_digest])


def shown_note(choice: int, token_ids: Sequence[int], is_finished: bool, num_cached_tokens: int) -> str:
    """Return the line in front of an event that shows something of a choice."""
    return _line(SHOWN, [choice, list(token_ids), is_finished, num_cached_tokens])


def logprobs_note(choice: int, logprobs: Sequence[TokenLogprob]) -> str:
    """Return the line with the log-probabilities of what an event shows."""
    return _line(LOGPROBS, [choice, [astuple(entry) for entry in logprobs]])


def together_note(num_events: int) -> str:
    """Return the line in front of the first of some events that belong together."""
    return _line(TOGETHER, num_events)


def _line(word: str, value: object) -> str:
    return f"{_PREFIX}{word} {json.dumps(value, separators=(',', ':'))}\n"


# In front of the last events of a stream without [DONE], of all choices' usage, of an error that others need not have.
ENDED_NOTE, COUNTED_NOTE, FAILED_NOTE = (_line(word, None) for word in (ENDED, COUNTED, FAILED))


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A complete event of a stream as the client gets it, or `num_events` that belong together, and its notes."""

    data: bytes
    notes: tuple[tuple[str, Any], ...] = ()
    num_events: int = 1


class EventSplitter:
    """Cuts a stream's bytes into events; what is no whole event yet waits, and those that belong together do.

    `end`: of an event. Where that is the end of a line, each note in front of an event is a line of its own.
    """

    def __init__(self, end: bytes = b"\n\n") -> None:
        self._end = end
        self._rest = self._notes = b""
        self._held: list[StreamEvent] = []

    def feed(self, data: bytes) -> Iterator[StreamEvent]:
        """Yield the events that these bytes complete; InternalError: a note is malformed."""
        parts = (self._rest + data).split(self._end)
        self._rest = parts.pop()
        for part in parts:
            if part.startswith(_RAW_PREFIX) and b"\n" not in part:
                self._notes += part + b"\n"
                continue
            self._held.append(_event(self._notes + part, self._end))
            self._notes = b""
            first = self._held[0]
            if len(self._held) >= _num_together(first):
                yield StreamEvent(b"".join(event.data for event in self._held), first.notes, len(self._held))
                self._held.clear()


def _num_together(event: StreamEvent) -> int:
    for word, value in event.notes:
        if word == TOGETHER:
            if type(value) is not int:
                raise InternalError("an instance sent a note of an unknown form")
            return value
    return 1


def _event(part: bytes, end: bytes) -> StreamEvent:
    notes = []
    while part.startswith(_RAW_PREFIX):
        line, _, part = part.partition(b"\n")
        word, _, value = line[len(_RAW_PREFIX) :].decode("utf-8", "replace").partition(" ")
        try:
            notes.append((word, json.loads(value)))
        except ValueError:
            raise InternalError(f"an instance sent a note that is not JSON: {word}") from None
    return StreamEvent(part + end, tuple(notes))


class ResumeState:
    """What the client has got of a stream so far; grows with each event that is relayed, until it `is_ended`."""

    def __init__(self) -> None:
        self._job: tuple[str, int, tuple[int, ...]] | None = None
        self._token_ids: list[list[int]] = []
        self._ended: set[int] = set()
        self._num_cached: dict[int, int] = {}
        self._logprobs: defaultdict[int, list[TokenLogprob]] = defaultdict(list)
        self._is_counted, self._adapter_digest = False, ""
        self._num_events = 0
        self.is_ended = False

    def take(self, event: StreamEvent) -> bool:
        """Note what an event shows; return whether it is an error that another instance need not have."""
        try:
            is_failure = False
            for word, value in event.notes:
                is_failure |= self._take(word, value)
            self._num_events += 0 if is_failure else event.num_events
            return is_failure
        except (TypeError, ValueError, IndexError, KeyError):
            raise InternalError("an instance sent a note of an unknown form") from None

    def _take(self, word: str, value: Any) -> bool:
        if word == BEGUN and self._job is None:
            job_id, created, seeds, num_choices, adapter_digest = value
            self._job = (str(job_id), int(created), tuple(map(int, seeds)))
            self._adapter_digest = str(adapter_digest)
            self._token_ids = [[] for _ in range(num_choices)]
        elif word == SHOWN:
            choice, token_ids, is_finished, num_cached = value
            self._token_ids[choice] += token_ids
            self._num_cached.setdefault(choice, num_cached)
            if is_finished:
                self._ended.add(choice)
        elif word == LOGPROBS:
            choice, entries = value
            self._logprobs[choice] += [TokenLogprob(*entry[:3], *map(tuple, entry[3:])) for entry in entries]
        elif word == COUNTED:
            self._is_counted = True
        elif word == ENDED:
            self.is_ended = True
        return word == FAILED

    @property
    def progress(self) -> Progress | None:
        """It as a value, None while nothing is known."""
        if self._job is None:
            return None
        choices = tuple(
            ChoiceProgress(
                tuple(token_ids),
                choice in self._ended,
                self._num_cached.get(choice, 0),
                tuple(self._logprobs.get(choice, ())),
            )
            for choice, token_ids in enumerate(self._token_ids)
        )
        return Progress(*self._job, choices, self._is_counted, self._num_events, self._adapter_digest)
