"""Several KV connectors as one: two in a row, and their descriptors as one to wait for. Knows no connector."""

from __future__ import annotations

import select
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fastdeploy_sd.engine.interfaces.kv_connector import KvArrival, KVConnector
from fastdeploy_sd.types import I32, Request, RequestId


class ArrivalFds:
    """The descriptors that are there, as one `fd` that is readable while any of them is; None = there are none."""

    def __init__(self, fds: Iterable[int | None]) -> None:
        given = [fd for fd in fds if fd is not None]
        self._poll: select.epoll | None = None
        self.fd = given[0] if given else None
        if len(given) > 1:
            self._poll = select.epoll()
            for fd in given:
                self._poll.register(fd, select.EPOLLIN)
            self.fd = self._poll.fileno()


class _Waiting(NamedTuple):
    """What the second connector will be asked for."""

    request: Request
    token_ids: I32
    block_ids: Sequence[int]


class ConnectorChain:
    """A KVConnector. A request that the first one keeps waiting is offered to the second when it arrives there."""

    def __init__(self, first: KVConnector, second: KVConnector) -> None:
        self._first, self._second = first, second
        self._in_first: dict[RequestId, _Waiting] = {}
        self._origins: dict[RequestId, Mapping[str, int]] = {}  # of the first's arrivals, which wait for the second
        self._fds = ArrivalFds([first.fd, second.fd])
        self.fd = self._fds.fd

    def begin(self, request: Request, token_ids: I32, num_cached_tokens: int, block_ids: Sequence[int]) -> bool:
        if self._first.begin(request, token_ids, num_cached_tokens, block_ids):
            self._in_first[request.request_id] = _Waiting(request, token_ids, block_ids)
            return True
        return self._second.begin(request, token_ids, num_cached_tokens, block_ids)

    def cancel(self, request_id: RequestId) -> None:
        self._origins.pop(request_id, None)
        is_in_first = self._in_first.pop(request_id, None) is not None
        (self._first if is_in_first else self._second).cancel(request_id)

    def arrivals(self) -> Sequence[KvArrival]:
        arrived = []
        for arrival in self._first.arrivals():
            name, (request, token_ids, block_ids) = arrival.request_id, self._in_first.pop(arrival.request_id)
            if not arrival.is_lost and self._second.begin(request, token_ids, arrival.num_tokens, block_ids):
                self._origins[name] = arrival.origins
            else:
                arrived.append(arrival)
        for arrival in self._second.arrivals():
            origins = {**self._origins.pop(arrival.request_id, {}), **arrival.origins}
            arrived.append(replace(arrival, origins=origins))
        return arrived
