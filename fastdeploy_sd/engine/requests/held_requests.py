"""Running requests that no step may have until their grammars' masks have been computed. Knows no grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fastdeploy_sd.engine.interfaces.grammars import Grammars
from fastdeploy_sd.engine.requests.request_state import RequestState
from fastdeploy_sd.types import RequestId, Rows


class HeldRequests:
    """The ids of these requests; see StepResult.held.

    Args:
        grammars: says when a mask has been computed; None = no request has a grammar.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self.request_ids: set[RequestId] = set()

    def add(self, request_ids: Iterable[RequestId]) -> None:
        """Hold requests from now on."""
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
