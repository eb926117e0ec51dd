"""Which client owns which request, and whether the client's process still lives. Engine side.

Knows no socket and no message; identities are opaque.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from fastdeploy_sd.types import RequestId


class ClientTable:
    """Clients by identity, their unfinished requests, and one process descriptor each.

    Invariant: a request id has an owner from `own` until `release` or the owner's `remove`; an owner is in the table.
    """

    def __init__(self) -> None:
        self._requests: dict[bytes, dict[int, RequestId]] = {}
        self._owner: dict[RequestId, tuple[bytes, int]] = {}
        self._fd: dict[bytes, int] = {}

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._requests

    def identities(self) -> tuple[bytes, ...]:
        return tuple(self._requests)

    def request_ids(self) -> tuple[RequestId, ...]:
        return tuple(self._owner)

    def add(self, identity: bytes, pid: int) -> int:
        """Enter a client; returns a descriptor that is readable when process `pid` ends. OSError: it is gone."""
        self._fd[identity] = fd = os.pidfd_open(pid)
        self._requests[identity] = {}
        return fd

    def fd_of(self, identity: bytes) -> int:
        return self._fd[identity]

    def ended(self, readable_fds: Collection[int]) -> list[bytes]:
        """Clients whose descriptor is among the readable ones."""
        return [identity for identity, fd in self._fd.items() if fd in readable_fds] if readable_fds else []

    def remove(self, identity: bytes) -> list[RequestId]:
        """Forget a client, close its descriptor, and return its unfinished requests."""
        os.close(self._fd.pop(identity))
        request_ids = list(self._requests.pop(identity).values())
        for request_id in request_ids:
            del self._owner[request_id]
        return request_ids

    def own(self, request_id: RequestId, identity: bytes, handle: int) -> None:
        """Note that a request, whose id must be free, is submission `handle` of a client."""
        self._owner[request_id] = (identity, handle)
        self._requests[identity][handle] = request_id

    def owner(self, request_id: RequestId) -> tuple[bytes, int] | None:
        """The client that waits for this request and its handle, None when it has ended or the client is gone."""
        return self._owner.get(request_id)

    def requests_of(self, identity: bytes, handles: Iterable[int]) -> list[RequestId]:
        """The unfinished requests among a client's submissions."""
        requests = self._requests[identity]
        return [requests[handle] for handle in handles if handle in requests]

    def release(self, request_id: RequestId) -> None:
        identity, handle = self._owner.pop(request_id)
        del self._requests[identity][handle]
