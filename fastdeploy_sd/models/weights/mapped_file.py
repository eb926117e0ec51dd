"""A file of tensors that is read by memory mapping, whatever its format."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import pathlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.weights.source import TensorInfo
from fastdeploy_sd.process.files import describe, open_regular

SAMPLE_BYTES = 4096


class MappedFile(ABC):
    """One open file: a header, then the tensors' bytes.

    Attributes:
        kind: what errors call the format.
        mode: type and permissions, as os.stat has them.
        data_start: where the tensors' bytes begin; TensorInfo counts from there.
        entries: the tensors by name.

    Raises (on construction):
        CheckpointError: no readable file.
    """

    kind: str
    data_start: int
    entries: dict[str, TensorInfo]

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: expected a readable {self.kind} file: {describe(error)}") from error
        self.mode = status.st_mode
        self._status = (status.st_size, status.st_mtime_ns)

    @abstractmethod
    def read(self, entry: TensorInfo) -> npt.NDArray[np.generic]:
        """Return a tensor as it is stored: a read-only view of the file, or a copy where it is not aligned."""

    def view(self, entry: TensorInfo) -> memoryview:
        """Return the bytes of a tensor."""
        return memoryview(self.map)[self.data_start + entry.begin : self.data_start + entry.end]

    def identity(self) -> dict[str, Any]:
        """Return what identifies the file: size, time of the last write, digests of the header and of samples.

        Two trainings of one base have the same size and header, and the same time where a container image sets it, but
        almost every tensor differs. A change is missed only if it keeps size, time and every sample.
        """
        size, mtime_ns = self._status
        header = hashlib.blake2b(self.map[: self.data_start], digest_size=16).hexdigest()
        return {"size": size, "mtime_ns": mtime_ns, "header": header, "samples": self._sample_digest()}

    def spans(self, num_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield all bytes of the file in order, u8[num_bytes] at a time, a multiple of a page; fewer at the end."""
        data = np.frombuffer(self.map, np.uint8)
        for begin in range(0, len(data), num_bytes):
            yield data[begin : begin + num_bytes]
            self.map.madvise(mmap.MADV_DONTNEED, begin, min(num_bytes, len(data) - begin))

    def is_unchanged(self) -> bool:
        """Whether its path still leads to a file of the size and time that this one was opened with."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == self._status

    def release(self, entry: TensorInfo) -> None:
        """Unmap the pages that lie within one tensor; views stay valid, and touching them maps the file again."""
        begin = -(-(self.data_start + entry.begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self.data_start + entry.end) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def fail(self, what: str) -> CheckpointError:
        """Return the error for a file that is not of its format."""
        return CheckpointError(f"{self.path}: not a valid {self.kind} file: {what}")

    def verify_no_overlap(self) -> None:
        """Raise CheckpointError where tensors share bytes."""
        spans = sorted((e.begin, e.end, name) for name, e in self.entries.items() if e.end > e.begin)
        for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
            if begin < end:
                raise self.fail(f"tensors {shown(first)} and {shown(second)} overlap")

    def _sample_digest(self) -> str:
        """Digest SAMPLE_BYTES from the middle of every tensor, in the file's order; all of a smaller tensor."""
        digest = hashlib.blake2b(digest_size=16)
        for entry in sorted(self.entries.values(), key=lambda entry: entry.begin):
            size = min(entry.end - entry.begin, SAMPLE_BYTES)
            begin = self.data_start + (entry.begin + entry.end - size) // 2
            digest.update(self.map[begin : begin + size])
            # Reading a page maps its neighbours too, which adds up over thousands of experts.
            self.release(entry)
        return digest.hexdigest()
