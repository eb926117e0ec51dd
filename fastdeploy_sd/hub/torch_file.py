"""Reads the tensors of a file of PyTorch (`.bin`, `.pt`) without running what is in it.

Such a file is a ZIP archive: `data.pkl` describes the tensors, `data/KEY` has the bytes of each storage.
Source: PyTorch's torch/serialization.py.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.hub.torch_description import RefusedError, TorchTensor, described, read_description
from fastdeploy_sd.process.files import open_regular
from fastdeploy_sd.process.safetensors_writer import ITEM_BYTES

# A description has some 200 bytes per tensor.
MAX_DESCRIPTION_BYTES = 1 << 25
MAX_ENTRIES = 100_000
_MAX_DEPTH = 4


class TorchFile:
    """One file.

    Attributes:
        tensors: by name, in the order of the file. Names of nested dictionaries are joined by dots.
        left_out: name -> kind of what is no tensor, as "epoch" -> "int".

    Raises (on construction):
        CheckpointError: no such file, no archive of PyTorch, or one that describes anything but dictionaries of
            tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TorchTensor] = {}
        self.left_out: dict[str, str] = {}
        self._num_seen = 0
        with self._archive() as archive:
            self._folder = self._find_folder(archive)
            description = self._read(archive, "data.pkl", MAX_DESCRIPTION_BYTES)
            try:
                found = read_description(description)
                self._sort("", found, 0)
            except RefusedError as error:
                raise self._error(str(error)) from None
            sizes = {info.filename: info.file_size for info in archive.infolist()}
        for name, tensor in self.tensors.items():
            self._verify(name, tensor, sizes)

    def in_order(self) -> list[tuple[str, TorchTensor]]:
        """Return the tensors storage by storage."""
        return sorted(self.tensors.items(), key=lambda item: item[1].key)

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Yield the bytes u8[shape.., item] of every tensor `in_order`, so that a storage is read once."""
        with self._archive() as archive:
            key, data = "", b""
            for name, tensor in self.in_order():
                if tensor.key != key:
                    key, data = tensor.key, self._read(archive, f"data/{tensor.key}")
                item = ITEM_BYTES[tensor.dtype]
                strides = (*(stride * item for stride in tensor.strides), 1)
                yield name, np.ndarray((*tensor.shape, item), np.uint8, data, tensor.offset * item, strides)

    @contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        try:
            with open_regular(self.path) as file, zipfile.ZipFile(file) as archive:
                yield archive
        except CheckpointError:
            raise
        except FileNotFoundError:
            raise self._error("expected a file of PyTorch, found none") from None
        except (OSError, zipfile.BadZipFile, RuntimeError, ValueError) as error:
            text = "a file that torch.save of PyTorch 1.6 or later wrote, which is a ZIP archive"
            raise self._error(f"expected {text}: {error}") from None

    def _find_folder(self, archive: zipfile.ZipFile) -> str:
        found = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1:
            raise self._error(f"expected one data.pkl in the archive, got {len(found)}")
        folder = found[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and self._member(archive, f"{folder}byteorder", 16) != b"little":
            raise self._error("expected numbers in little-endian order, got others")
        return folder

    def _read(self, archive: zipfile.ZipFile, name: str, max_bytes: int | None = None) -> bytes:
        return self._member(archive, self._folder + name, max_bytes)

    def _member(self, archive: zipfile.ZipFile, name: str, max_bytes: int | None = None) -> bytes:
        info = archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise self._error(f"expected members that are not compressed, got {name}")
        if max_bytes is not None and info.file_size > max_bytes:
            raise self._error(f"expected at most {max_bytes} bytes in {name}, got {info.file_size}")
        return archive.read(info)

    def _sort(self, prefix: str, value: object, depth: int) -> None:
        """Sort what is in a dictionary into tensors and the rest; it may share parts with others, or contain itself."""
        self._num_seen += 1
        if self._num_seen > MAX_ENTRIES:
            raise RefusedError(f"expected at most {MAX_ENTRIES} entries, got more")
        if isinstance(value, TorchTensor) and prefix:
            self.tensors[prefix] = value
        elif isinstance(value, dict) and depth < _MAX_DEPTH:
            for name, part in value.items():
                if not isinstance(name, str):
                    raise RefusedError(f"expected names in the dictionaries, got {shown(name)}")
                self._sort(f"{prefix}.{name}" if prefix else name, part, depth + 1)
        elif prefix:
            self.left_out[prefix] = type(value).__name__
        else:
            raise RefusedError(f"expected a dictionary of tensors, got {described(value)}")

    def _verify(self, name: str, tensor: TorchTensor, sizes: Mapping[str, int]) -> None:
        """Refuse a tensor that reaches beyond its storage."""
        needed, got = tensor.num_storage_bytes, sizes.get(f"{self._folder}data/{tensor.key}")
        if got is None or got < needed:
            raise self._error(
                f"tensor {name!r}: expected {needed} bytes of storage {tensor.key!r}, got {got or 'none'}"
            )

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")
