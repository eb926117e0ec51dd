"""What collective ops of ranks on GPUs exchange values through: memory of every GPU that the others read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.cuda.memory import pinned_zeros
from fastdeploy_sd.device.cuda.sharing import handle_of, open_shared, take_shareable
from fastdeploy_sd.device.library import returned
from fastdeploy_sd.types import I64

if TYPE_CHECKING:
    from fastdeploy_sd.device.cuda.library import CudaLibrary

_STATUS_WORDS = 2  # failed_in, missing: see RankStatus in custom_ops/cuda/communicator.h
_PAGE_BYTES = 4096


class GpuCommunicator:
    """One rank's end of a group whose ranks have a GPU each; see Communicator. `begin` is put on the stream.

    A GPU cannot refuse: where a rank has failed or does not come, a pass ends with wrong values, and `verify` says so.
    It is called when the pass has been waited for, before anything of it is used. The host's communicator begins, fails
    and ends attempts: GPUs that wait for one another look at its flags.

    Args:
        local: this rank's end of the host's group, which is closed after this one.
        timeout_s: how long a GPU waits for another rank's.
        exchange: gives bytes to all ranks, and returns those of all in their order; called once.
    """

    def __init__(
        self,
        library: CudaLibrary,
        stream: int,
        local: Communicator,
        timeout_s: float,
        exchange: Callable[[bytes], Sequence[bytes]],
    ) -> None:
        self._library, self._stream, self._local = library, stream, local
        self.rank, self.size = local.rank, local.size
        self._attempt = 0
        buffer_bytes = ctypes.c_int64(library.number("rank_buffer_bytes"))
        num_bytes = library.number("rank_memory_bytes", buffer_bytes)
        own = take_shareable(library, num_bytes)
        library.call("zero", own.address, ctypes.c_int64(num_bytes), stream)
        library.call("stream_synchronize", stream)  # the others see zeros
        handles = exchange(handle_of(library, own))
        self._memory = [
            own if rank == self.rank else open_shared(library, handle, num_bytes) for rank, handle in enumerate(handles)
        ]
        self._status: I64 = pinned_zeros(library, _STATUS_WORDS * 8).view(np.int64)
        self._flags = _flags_of(local)
        flags = library.made("register_host", self._flags, ctypes.c_int64(_PAGE_BYTES))
        handle = ctypes.c_int32()
        library.call(
            "open_ranks", ctypes.c_int32(self.rank), ctypes.c_int32(self.size), buffer_bytes,
            ctypes.c_double(timeout_s), (ctypes.c_void_p * self.size)(*(memory.address for memory in self._memory)),
            flags, self._status.ctypes.data, ctypes.byref(handle),
        )  # fmt: skip
        self.handle = handle.value

    def begin(self, attempt: int) -> None:
        """See Communicator.begin; all GPUs have done what was put on them in the attempt before."""
        self._local.begin(attempt)
        self._attempt = attempt
        self._library.call("begin_attempt", ctypes.c_int32(self.handle), ctypes.c_int64(attempt), self._stream)

    def fail(self) -> None:
        self._local.fail()

    def abort(self) -> None:
        self._local.abort()

    def verify(self) -> None:
        """Look whether this attempt's passes, which were waited for, have what all ranks gave.

        Raises ValueError: they have not; the text names the rank.
        """
        failed_in, missing = self._status.tolist()
        if failed_in != self._attempt + 1:
            return
        is_aborted, *failed = (ctypes.c_uint64 * (self.size + 1)).from_address(self._flags)
        if is_aborted:
            raise ValueError("the ranks' group was aborted")
        for rank, attempt in enumerate(failed):
            if attempt == self._attempt + 1:
                raise ValueError(f"rank {rank} has failed")
        raise ValueError(f"rank {missing} did not come in time")

    def close(self) -> None:
        """Give everything back but what others may have open, which goes with this object. No op may run on it, then
        or later."""
        self._library.discard("stream_synchronize", self._stream)
        self._library.functions.fdsd_cuda_close_ranks(ctypes.c_int32(self.handle))
        self._library.discard("unregister_host", self._flags)
        self.handle = -1
        self._memory = [self._memory[self.rank]]


def _flags_of(local: Communicator) -> int:
    """Address of the flag that `local` sets for the waiting ranks; see custom_ops/cpu/runtime/group_flags.h."""
    address = ctypes.c_void_p()
    error = returned("communicator_flags", ctypes.c_char_p, ctypes.c_int32(local.handle), ctypes.byref(address))
    if error:
        raise ValueError(error.decode())
    return address.value or 0
