"""The interface of answer formats: the whole answer, the events of a stream, and errors in one. Knows no sockets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.entrypoints.openai.usage import UsageCounter
from fastdeploy_sd.errors import FdsdError
from fastdeploy_sd.text.output_processor import Completion, TextDelta
from fastdeploy_sd.text.tokenizer import Tokenizer
from fastdeploy_sd.wire.http.error_format import to_json
from fastdeploy_sd.wire.http.event_stream import EVENTS


@dataclass(frozen=True, slots=True)
class StreamPart:
    """Events that belong together: a client gets all of them or none, also where a stream goes on elsewhere.

    Attributes:
        text: the events, each ending in an empty line; or lines.
    """

    text: str
    num_events: int = 1
    is_last: bool = False


class AnswerFormat(ABC):
    """The JSON of the answer to one job.

    Attributes:
        media_type: of a stream.
        stream_end: what follows all events of a stream.
        split_depth: how deep the log-probabilities of single tokens are in the whole answer, see `json_pieces`.
        repeats_all: the last part of a stream has all that the others had, so it may be large.
    """

    media_type: ClassVar[str] = EVENTS
    stream_end: ClassVar[str]
    split_depth: ClassVar[int] = 5
    repeats_all: ClassVar[bool] = False

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer) -> None:
        self._job = job
        self._answer = job.answer
        self._tokenizer = tokenizer

    def usage_counter(self) -> UsageCounter:
        """Return a counter of what the job costs, which has counted what another instance did."""
        return UsageCounter(self._job, self._tokenizer)

    @abstractmethod
    def whole(self, completions: Sequence[Completion], usage: UsageCounter) -> dict[str, Any]:
        """Return the answer at once, from one completion per choice."""

    @abstractmethod
    def part(self, choice: int, delta: TextDelta, usage: UsageCounter) -> StreamPart | None:
        """Return what a delta, counted in `usage`, adds to a stream; None when a client would learn nothing from it."""

    @abstractmethod
    def ending(self, usage: UsageCounter) -> str:
        """Return the event that follows those of all choices, "" = there is none."""

    @abstractmethod
    def error(self, error: FdsdError) -> StreamPart:
        """Return what ends a stream that has failed."""


def data_event(value: object) -> str:
    """Return a server-sent event without a name."""
    return f"data: {to_json(value)}\n\n"
