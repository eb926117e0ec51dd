"""Keeps the memory over which a host's ranks share experts like that of other hosts. Knows no socket."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call

# With what every frame begins.
MAGIC = b"FDXM"


class ExpertMirror:
    """This host's end towards all others; one thread's. See custom_ops/cpu/runtime/expert_mirror.h.

    Attributes:
        frame_bytes: of the longest frame.
    """

    def __init__(self, handle: int, frame_bytes: int) -> None:
        self._handle, self.frame_bytes = handle, frame_bytes
        self._frame = np.empty(frame_bytes, np.uint8)
        self._num_bytes = ctypes.c_int64()

    @classmethod
    def open(cls, fd: int, host: int, num_hosts: int, news_fd: int) -> ExpertMirror | None:
        """Return the mirror of a segment, None as long as no rank has opened this.

        Args:
            fd: of an `expert_segment`; may be closed afterwards.
            host: of `num_hosts`, which have as many ranks each, in order.
            news_fd: eventfd that is written when there may be something to collect.

        Raises ValueError: the hosts cannot share the ranks evenly.
        """
        handle, frame_bytes = ctypes.c_int32(), ctypes.c_int64()
        _call(
            "open",
            file=fd,
            host=host,
            num_hosts=num_hosts,
            news=news_fd,
            mirror=ctypes.addressof(handle),
            frame_bytes=ctypes.addressof(frame_bytes),
        )
        return cls(handle.value, frame_bytes.value) if handle.value else None

    def begin(self, host: int) -> None:
        """Say that a connection with another host begins: all that concerns it is collected anew."""
        self._call("begin", "Host", host=host)

    def lose(self, host: int) -> None:
        """Say that the connection has ended: its ranks are loading, or gone where they were about to leave."""
        self._call("lose", "Host", host=host)

    def collect(self, host: int) -> bytes:
        """Return the next frame for a host, b"" = none."""
        address = ctypes.addressof(self._num_bytes)
        self._call("collect", host=host, num_bytes=address, frame=self._frame.ctypes.data)
        return self._frame[: self._num_bytes.value].tobytes()

    def apply(self, host: int, frame: bytes | memoryview) -> None:
        """Take over what a host has collected. Raises ValueError: that is no frame for this host."""
        data = np.frombuffer(frame, np.uint8)
        self._call("apply", host=host, num_bytes=len(data), frame=data.ctypes.data)

    def close(self) -> None:
        """Give everything back; no call may follow."""
        self._call("close", "Host", host=0)

    def _call(self, name: str, struct: str = "", **values: Any) -> None:
        _call(name, struct, mirror=self._handle, **values)


def _call(name: str, struct: str = "", **values: Any) -> None:
    call(f"expert_mirror_{name}", struct_type(f"ExpertMirror{struct or name.capitalize()}Params")(**values))
