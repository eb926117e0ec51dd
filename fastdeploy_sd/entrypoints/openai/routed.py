"""Requests from a router: who may send them, and what a stream tells the router besides its events."""

from __future__ import annotations

from collections import defaultdict

from starlette.datastructures import Headers

from fastdeploy_sd.cluster.route import NOT_AUTHENTIC, ROUTE_HEADER, Route, RouteReader
from fastdeploy_sd.cluster.stream_metadata import ENDED_NOTE, begun_note, logprobs_note, shown_note, together_note
from fastdeploy_sd.entrypoints.openai.answer_format import StreamPart
from fastdeploy_sd.entrypoints.openai.job import GenerationJob
from fastdeploy_sd.errors import Forbidden
from fastdeploy_sd.text.output_processor import TextDelta
from fastdeploy_sd.types import TokenLogprob


class RouteGate:
    """Admits requests of this deployment's routers; without a reader there is no router."""

    def __init__(self, reader: RouteReader | None = None) -> None:
        self._reader = reader

    def route_of(self, headers: Headers) -> Route | None:
        """Return the route of a request, None when it has none.

        Raises Forbidden: it has one that is not of a router of this deployment.
        """
        header = headers.get(ROUTE_HEADER)
        if header is None:
            return None
        if self._reader is None:
            raise Forbidden(
                f"{ROUTE_HEADER}: expected no such header, as this server has no router (router)",
                code=NOT_AUTHENTIC,
            )
        return self._reader.read(header)

    def engine_of(self, route: Route) -> int | None:
        """Return the engine that a route of `route_of` names; None: this server has only one."""
        return None if self._reader is None else self._reader.engine_of(route)


class StreamMetadata:
    """What the events of a stream show, for the router, which must be able to continue after any of them.

    Tokens whose text is held back, and which therefore have no event, belong to the next one of their choice.
    """

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._logprobs: list[TokenLogprob] = []  # of a Response, whose last event repeats them
        self._keeps_logprobs = job.answer.response is not None and job.requests.sampling.logprobs is not None

    def opening(self) -> str:
        """Return the note in front of the first event."""
        requests = self._job.requests
        digest = "" if requests.adapter is None else requests.adapter.digest
        return begun_note(self._job.job_id, self._job.created, requests.seeds, len(requests), digest)

    def add(self, choice: int, delta: TextDelta) -> None:
        """Take a delta of a choice, which may have an event or not."""
        self._token_ids[choice] += delta.token_ids
        if self._keeps_logprobs:
            self._logprobs += delta.logprobs or ()

    def of_part(self, choice: int, delta: TextDelta, part: StreamPart) -> str:
        """Return the notes in front of the events of a delta that was taken."""
        token_ids = self._token_ids.pop(choice, [])
        notes = shown_note(choice, token_ids, delta.finish_reason is not None, delta.num_cached_tokens)
        if self._logprobs:
            notes += logprobs_note(choice, self._logprobs)
            self._logprobs.clear()
        if part.num_events > 1:
            notes += together_note(part.num_events)
        return notes + (ENDED_NOTE if part.is_last else "")
