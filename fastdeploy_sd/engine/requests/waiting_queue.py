"""Requests that wait for a place, in the order in which they get one. Knows no blocks and no budget."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

from fastdeploy_sd.engine.requests.request_state import RequestState


class WaitingQueue:
    """Waiting requests in two orders: by `RequestState.key` for each client, and by number of tokens.

    A preempted request keeps its key and so comes back before every request of its client that arrived later.
    """

    def __init__(self) -> None:
        self.clients: dict[str, list[RequestState]] = {}  # by key; no empty lists
        self._by_length: list[RequestState] = []  # a waiting request does not change its number of tokens
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._by_length)

    def __iter__(self) -> Iterator[RequestState]:
        """The waiting requests, shortest first."""
        return iter(self._by_length)

    def push(self, state: RequestState) -> None:
        insort(self.clients.setdefault(state.client, []), state, key=_key)
        insort(self._by_length, state, key=_length)
        self.num_prompt_tokens += state.num_prompt_tokens

    def peek(
        self,
        num_seats: Mapping[str, int],
        seated: Iterable[RequestState] = (),
        may_start: Callable[[RequestState], bool] | None = None,
    ) -> RequestState | None:
        """The request to admit next: of the client with the fewest seats, else the lowest key. None if empty.

        If that one has an adapter, the next of those with one: of the client with the fewest `seated` with adapters.
        Else a request could wait for ever for a place that clients with fewer seats pass from one to the next.

        `may_start`: of those for which it is true; None = of all.
        """
        firsts = (next(filter(may_start, waiting), None) for waiting in self.clients.values())
        heads = [state for state in firsts if state is not None]
        head = min(heads, key=lambda state: (num_seats.get(state.client, 0), state.key), default=None)
        if head is None or head.adapter is None or len(heads) == 1:
            return head
        num_adapted = Counter(state.client for state in seated if state.adapter is not None)
        adapted = (state for state in heads if state.adapter is not None)
        return min(adapted, key=lambda state: (num_adapted[state.client], state.key))

    def remove(self, state: RequestState) -> None:
        waiting = self.clients[state.client]
        del waiting[bisect_left(waiting, state.key, key=_key)]
        if not waiting:
            del self.clients[state.client]
        del self._by_length[bisect_left(self._by_length, _length(state), key=_length)]
        self.num_prompt_tokens -= state.num_prompt_tokens


_key = attrgetter("key")


def _length(state: RequestState) -> tuple[int, tuple[int, int]]:
    return state.num_tokens, state.key
