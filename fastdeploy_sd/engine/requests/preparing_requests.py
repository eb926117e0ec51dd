"""Requests that wait for their grammars: in front of the queue, or while they run. Knows no queue and no blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from fastdeploy_sd.engine.interfaces.grammars import Grammars
from fastdeploy_sd.engine.requests.request_state import RequestState, RequestStatus
from fastdeploy_sd.errors import BadRequest
from fastdeploy_sd.types import Request, RequestId, Rows
from fastdeploy_sd.types.stats import GrammarStats


class PreparingRequests:
    """The requests whose grammars are not ready, and who holds which grammar."""

    def __init__(self, grammars: Grammars | None) -> None:
        """Keep requests while `grammars` compiles for them; None = no request may have a grammar."""
        self._grammars = grammars
        self._waiting: dict[str, dict[str, RequestState]] = {}  # grammar -> id -> request

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[RequestState]:
        return chain.from_iterable(group.values() for group in self._waiting.values())

    @property
    def num_prompt_tokens(self) -> int:
        return sum(state.num_prompt_tokens for state in self)

    def hold(self, request: Request) -> bool:
        """Take the grammar of a request, if it has one, until `drop`; returns whether it is ready.

        Raises BadRequest if nothing here compiles grammars, or this one is known not to be valid.
        """
        grammar = request.grammar
        if not grammar:
            return True
        if self._grammars is None:
            raise BadRequest("grammar: expected none, as nothing here guides outputs, got one", param="grammar")
        self._grammars.prepare(grammar)
        error = self._grammars.error_of(grammar)
        if error:
            self._grammars.release(grammar)
            raise BadRequest(_refused(error), param="grammar")
        return self._grammars.is_ready(grammar)

    def drop(self, request: Request) -> None:
        if request.grammar:
            assert self._grammars is not None, "it was held"
            self._grammars.release(request.grammar)

    def add(self, state: RequestState) -> None:
        state.status = RequestStatus.PREPARING
        self._waiting.setdefault(state.request.grammar, {})[state.request_id] = state

    def remove(self, state: RequestState) -> None:
        group = self._waiting[state.request.grammar]
        del group[state.request_id]
        if not group:
            del self._waiting[state.request.grammar]

    def take(self) -> tuple[list[RequestState], list[tuple[RequestState, str]]]:
        """Return the requests that need not wait any longer: those that are taken out, as their grammars are ready,
        and those that stay for their end, as their grammars have failed, each with what a client is told."""
        ready: list[RequestState] = []
        failed: list[tuple[RequestState, str]] = []
        for grammar in () if self._grammars is None else self._grammars.take_prepared():
            group = self._waiting.get(grammar)
            if group is None:
                continue
            assert self._grammars is not None, "it was asked"
            error = self._grammars.error_of(grammar)
            if error:
                failed += [(state, _refused(error)) for state in group.values()]
            elif self._grammars.is_ready(grammar):
                ready += self._waiting.pop(grammar).values()
        return ready, failed

    def stats(self) -> GrammarStats:
        return GrammarStats() if self._grammars is None else self._grammars.stats()

    @property
    def fd(self) -> int | None:
        """Readable as long as `take` may have something to return; None = never."""
        return None if self._grammars is None else self._grammars.fd


def _refused(error: str) -> str:
    return f"grammar: expected one that can be compiled, got: {error}"


class HeldRequests:
    """Ids of running requests that no step may have until their masks have been computed; see StepResult.held."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self.request_ids: set[RequestId] = set()

    def add(self, request_ids: Iterable[RequestId]) -> None:
        self.request_ids.update(request_ids)

    def forget(self, request_id: RequestId) -> None:
        """Let go of a request that does not run any more, whether or not it was held."""
        self.request_ids.discard(request_id)

    def others(self, running: Sequence[RequestState]) -> tuple[list[RequestState], Rows] | None:
        """Return which of the running requests a step may have now, and their counters; None = all."""
        if self._grammars is not None:
            self.request_ids.difference_update(self._grammars.take_masked())
        if not self.request_ids:
            return None
        states = [state for state in running if state.request_id not in self.request_ids]
        return states, np.array([state.counter_row for state in states], np.intp)
