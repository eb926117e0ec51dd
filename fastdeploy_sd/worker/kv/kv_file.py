"""Memory for a rank's KV that rank 0's process shares, so that rank 0 copies pages of the whole model.

It has no name, so it is freed when the last process that has it ends, even by a crash. Knows no layer.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.memory_nodes import spread

# A piece begins at a page of the system, so that no two pieces share one.
ALIGNMENT = 4096


def create_kv_file() -> int:
    """Return the descriptor of an empty file in memory, from which two processes make a KvFile."""
    return os.memfd_create("fdsd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class KvFile:
    """Hands out the memory of a file piece by piece. Two processes that ask for the same pieces get the same memory.

    The system provides a page when it is first touched, by either process; see memory_nodes.

    Args:
        fd: of a `create_kv_file`; may be closed afterwards.
        num_bytes: of all pieces, each rounded up to ALIGNMENT; the same in both processes.

    Raises OSError, OverflowError: the system has too little memory, or the other process asked for another length.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)
        # The second process must ask for the same length.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # a system without huge pages for files of memory
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._rest: npt.NDArray[np.uint8] = spread(np.frombuffer(memory, np.uint8))

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Return the next piece; it keeps the memory."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        assert size <= len(self._rest), f"a piece of {num_bytes} bytes where {len(self._rest)} are left"
        piece, self._rest = self._rest[:num_bytes], self._rest[size:]
        return piece.view(dtype).reshape(shape)
