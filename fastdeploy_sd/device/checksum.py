"""Checksums of large arrays, at the speed of memory."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.library import library, returned


def chunk_checksums(data: npt.NDArray[np.uint8], chunk_bytes: int) -> npt.NDArray[np.uint64]:
    """Return the XXH64 (seed 0) of each chunk of u8[n], the last one shorter; on all kernel threads.

    Raises ValueError: chunk_bytes < 1, or `data` is not contiguous.
    """
    if not data.flags.c_contiguous:
        raise ValueError("data: expected contiguous bytes, got a strided view")
    checksums = np.empty(-(-data.nbytes // max(chunk_bytes, 1)), np.uint64)
    sizes = (ctypes.c_int64(data.nbytes), ctypes.c_int64(chunk_bytes))
    addresses = ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(checksums.ctypes.data)
    error = returned("chunk_checksums", ctypes.c_char_p, addresses[0], *sizes, addresses[1])
    if error:
        raise ValueError(error.decode())
    return checksums


def packed_layout_version() -> int:
    """Return the number that changes when packing a matrix would write other bytes."""
    return int(library().fdsd_packed_layout_version())
