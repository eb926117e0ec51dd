"""What the collective ops exchange bytes through: memory that ranks share, or somebody else's function."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable
from typing import Any

from fastdeploy_sd.runtime.layout import struct_type
from fastdeploy_sd.runtime.library import call, library

# Two buffers of 256 KiB, the most that the kernels use, for each of 4 ranks, and a page of flags.
SEGMENT_BYTES = 4096 + 2 * 4 * (256 << 10)
TIMEOUT_S = 30.0
# Gives `bytes` to every rank and returns those of all, in order of the ranks, equally many from each.
ExchangeBytes = Callable[[bytes], bytes]
_EXCHANGE_TYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


def shared_segment(num_bytes: int = SEGMENT_BYTES) -> int:
    """Return the descriptor of a new segment for `Communicator.shared`, to be handed to the ranks and closed.

    It has no name: nothing is left of it when the last process that has it ends, however that ends. It cannot shrink.
    """
    fd = os.memfd_create("fdsd-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Communicator:
    """One rank's end of a group; `shared` and `over` make one.

    Ops of every rank run in the same order with the same sizes. An op of a group fails with a ValueError that names the
    rank: at once when another rank has failed or the group was aborted, else when a rank does not come in time.

    Attributes:
        handle: what ops take.
        rank: 0..size - 1.
        size: 2 or 4.
    """

    def __init__(self, opener: str, params: Any, keep: object = None) -> None:
        handle = ctypes.c_int32()
        params.communicator = ctypes.addressof(handle)
        call(opener, params)
        self.handle, self.rank, self.size = handle.value, int(params.rank), int(params.size)
        self._keep = keep

    @classmethod
    def shared(cls, fd: int, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> Communicator:
        """Return an end over memory that processes of one host, or threads, share.

        Args:
            fd: of a `shared_segment` that no other group has used; may be closed afterwards.
            timeout_s: how long an op waits for another rank, seconds; time in which this process is stopped does not
                count.

        Raises:
            ValueError: not a segment, or another number of ranks than the others gave.
        """
        params = struct_type("SharedCommunicatorParams")(file=fd, rank=rank, size=size, timeout_s=timeout_s)
        return cls("communicator_open_shared", params)

    @classmethod
    def over(cls, exchange: ExchangeBytes, rank: int, size: int, on_error: Callable[[Exception], None]) -> Communicator:
        """Return an end over a function, such as one of a process group.

        Args:
            exchange: called from whatever thread runs an op. It must end: its own deadline is the op's.
            on_error: told what it raised; the op fails.
        """

        def run(mine: int, num_bytes: int, all_ranks: int) -> int:
            try:
                data = exchange(ctypes.string_at(mine, num_bytes))
                if len(data) != num_bytes * size:
                    raise ValueError(f"exchange: expected {num_bytes} bytes of {size} ranks, got {len(data)} in all")
                ctypes.memmove(all_ranks, data, len(data))
            except Exception as error:
                on_error(error)
                return 1
            return 0

        function = _EXCHANGE_TYPE(run)
        address = ctypes.cast(function, ctypes.c_void_p).value
        params = struct_type("CallbackCommunicatorParams")(exchange=address, rank=rank, size=size)
        return cls("communicator_open_callback", params, keep=function)

    def begin(self, attempt: int) -> None:
        """Begin an attempt at a pass: ranks that stopped at different ops of the last one are in step again.

        Every rank calls it before its pass, with the same number; it waits for nobody.

        Raises:
            ValueError: the number is not higher than the last one.
        """
        self._call("begin", ctypes.c_int64(attempt))

    def fail(self) -> None:
        """Make the ops of this attempt fail on every rank, at once; from any thread."""
        self._call("fail")

    def abort(self) -> None:
        """Make all ops fail on every rank, at once and for ever; from any thread."""
        self._call("abort")

    def close(self) -> None:
        """Give the handle back. No op may run on it, then or later."""
        library().fdsd_communicator_close(self.handle)
        self.handle = -1

    def _call(self, name: str, *args: Any) -> None:
        function = getattr(library(), f"fdsd_communicator_{name}")
        function.restype = ctypes.c_char_p
        error = function(self.handle, *args)
        if error:
            raise ValueError(f"communicator: {error.decode()}")
