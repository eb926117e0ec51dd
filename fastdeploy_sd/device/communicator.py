"""What the collective ops exchange bytes through: memory that ranks share, or a function that the caller gives."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable
from typing import Any, Protocol

from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call, library, returned

# Two buffers of 256 KiB, the most that the kernels use, for each of 4 ranks, and a page of flags.
SEGMENT_BYTES = 4096 + 2 * 4 * (256 << 10)
TIMEOUT_S = 30.0
_EXCHANGE_TYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


class Exchange(Protocol):
    """What carries bytes between nodes, such as hosts."""

    def exchange(self, data: bytes) -> bytes:
        """Give it to every node and return that of all, in order of the nodes, equally much from each.

        It must end: its own deadline is the op's. Called, as `begin` and `fail`, by the thread that runs the ops.
        """
        ...

    def begin(self, attempt: int) -> None:
        """An attempt begins; what was not fetched of earlier ones is forgotten."""
        ...

    def fail(self) -> None:
        """Make this attempt's exchange fail on every node, at once."""
        ...

    def abort(self) -> None:
        """Make all exchanges of this node fail, at once and for ever; from any thread."""
        ...


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
    """One rank's end of a group of 2 or 4; `shared` and `over` make one. Ops take its handle.

    Ops of every rank run in the same order with the same sizes. An op of a group fails with a ValueError that names the
    rank: at once when another rank has failed or the group was aborted, else when a rank does not come in time.
    """

    def __init__(self, opener: str, params: Any, keep: object = None, exchange: Exchange | None = None) -> None:
        handle = ctypes.c_int32()
        params.communicator = ctypes.addressof(handle)
        call(opener, params)
        self.handle, self.rank, self.size = handle.value, int(params.rank), int(params.size)
        self._keep, self._exchange = keep, exchange

    @classmethod
    def shared(cls, fd: int, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> Communicator:
        """Return an end over memory that processes of one host, or threads, share.

        Args:
            fd: of a `shared_segment` that no other group has used; may be closed afterwards.
            timeout_s: how long an op waits for another rank; time in which this process is stopped does not count.

        Raises ValueError: not a segment, or another number of ranks than the others gave.
        """
        params = struct_type("SharedCommunicatorParams")(file=fd, rank=rank, size=size, timeout_s=timeout_s)
        return cls("communicator_open_shared", params)

    @classmethod
    def over(
        cls,
        exchange: Exchange | None,
        rank: int,
        size: int,
        on_error: Callable[[Exception], None],
        local: Communicator | None = None,
    ) -> Communicator:
        """Return an end over something that exchanges bytes between nodes, such as hosts; both are closed after this.

        Args:
            exchange: of the first rank of each node; None = this rank is not the first.
            on_error: told what it raised; the op fails.
            local: this rank's end of its node's group; None = a node is one rank.
        """
        num_nodes = size if local is None else size // local.size

        def run(mine: int, num_bytes: int, of_all_nodes: int) -> int:
            assert exchange is not None
            try:
                data = exchange.exchange(ctypes.string_at(mine, num_bytes))
                if len(data) != num_bytes * num_nodes:
                    raise ValueError(f"exchange: expected {num_bytes} bytes of {num_nodes} nodes, got {len(data)}")
                ctypes.memmove(of_all_nodes, data, len(data))
            except Exception as error:
                on_error(error)
                return 1
            return 0

        function = None if exchange is None else _EXCHANGE_TYPE(run)
        address = None if function is None else ctypes.cast(function, ctypes.c_void_p).value
        params = struct_type("CallbackCommunicatorParams")(
            exchange=address, local=0 if local is None else local.handle, rank=rank, size=size
        )
        return cls("communicator_open_callback", params, function, exchange)

    def begin(self, attempt: int) -> None:
        """Begin an attempt at a pass: ranks that stopped at different ops of the last one are in step again.

        Every rank calls it before its pass, with the same number; it does not wait. Raises ValueError: the number is
        not higher than the last one.
        """
        self._call("begin", ctypes.c_int64(attempt))
        if self._exchange is not None:
            self._exchange.begin(attempt)

    def fail(self) -> None:
        """Make the ops of this attempt fail on every rank, at once; by the thread that runs them."""
        self._call("fail")
        if self._exchange is not None:
            self._exchange.fail()

    def abort(self) -> None:
        """Make all ops fail on every rank of this node, at once and for ever; from any thread."""
        self._call("abort")
        if self._exchange is not None:
            self._exchange.abort()

    def close(self) -> None:
        """Give the handle back. No op may run on it, then or later."""
        library().fdsd_communicator_close(self.handle)
        self.handle = -1

    def _call(self, name: str, *args: Any) -> None:
        error = returned(f"communicator_{name}", ctypes.c_char_p, self.handle, *args)
        if error:
            raise ValueError(f"communicator: {error.decode()}")
