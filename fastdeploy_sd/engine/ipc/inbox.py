"""Inbox: the frames that have arrived at the engine. Submissions wait in it; all others are handed out at once.

Reading a request takes some time, and many may come in one burst; an abort, a ping or a farewell takes none. Knows the
handle of a submission and nothing else in it, and no engine.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from fastdeploy_sd.engine.ipc import messages as m
from fastdeploy_sd.wire.channel import ServerChannel


class Inbox:
    """Frames in the order of their arrival; one client's submissions are known by their handles.

    A frame longer than `max_frame_bytes` is taken as unreadable, without reading it; `receive_s` bounds one `receive`.
    """

    def __init__(self, channel: ServerChannel, max_frame_bytes: int, receive_s: float) -> None:
        self._channel, self._receive_s = channel, receive_s
        self._max_frame_bytes = max_frame_bytes
        self._submissions: OrderedDict[tuple[bytes, int], bytes] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._submissions)

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Take what has arrived; yields the frames that are no submissions."""
        deadline = time.monotonic() + self._receive_s
        for identity, frame in self._channel.receive():
            handle = m.handle_of_submit(frame) if len(frame) <= self._max_frame_bytes else None
            if handle is None or (identity, handle) in self._submissions:
                yield identity, frame
            else:
                self._submissions[identity, handle] = frame
            if time.monotonic() >= deadline:
                return

    def is_too_long(self, frame: bytes) -> bool:
        """Whether a frame is longer than any that a client may send."""
        return len(frame) > self._max_frame_bytes

    def next_submission(self) -> tuple[bytes, bytes]:
        """Return the one that has waited longest: client and frame. There must be one."""
        (identity, _), frame = self._submissions.popitem(last=False)
        return identity, frame

    def withdraw(self, identity: bytes, handles: Iterable[int]) -> list[bytes]:
        """Take back a client's submissions; returns the frames of those that still waited."""
        found = (self._submissions.pop((identity, handle), None) for handle in handles)
        return [frame for frame in found if frame is not None]

    def drop(self, identity: bytes) -> None:
        for key in [key for key in self._submissions if key[0] == identity]:
            del self._submissions[key]
