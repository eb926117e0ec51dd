"""Several descriptors as one, for a caller that waits until a step has something to take."""

from __future__ import annotations

import select
from collections.abc import Iterable


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
