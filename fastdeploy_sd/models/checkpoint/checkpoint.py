"""A checkpoint directory: config.json and the tensors of one or many safetensors files. Executes nothing from it."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError, shown, suggest
from fastdeploy_sd.models.checkpoint.config_file import CONFIG_NAME, read_config
from fastdeploy_sd.models.checkpoint.safetensors import SafetensorsFile
from fastdeploy_sd.process.files import read_json

MAX_FILES, MAX_NAME_CHARS = 10_000, 255
FLOAT8_BLOCK = 128  # rows and columns that share a scale
Weights = npt.NDArray[np.generic]  # float32, float16, or bfloat16 as u16 bits


class Checkpoint:
    """Tensors by name, wherever they lie.

    Attributes:
        path: the directory.
        config_path, config: config.json and what it holds.

    Raises (on construction):
        CheckpointError: no such directory, no config.json, quantised weights, no safetensors, or a malformed one.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.config_path = path, path / CONFIG_NAME
        self.config = read_config(path)
        self._open_files = [SafetensorsFile(path / name) for name in self._file_names()]
        self._files: dict[str, SafetensorsFile] = {}
        for file in self._open_files:
            for tensor in file.entries:
                if tensor in self._files:
                    names = f"{self._files[tensor].path.name} and {file.path.name}"
                    raise CheckpointError(f"{path}: tensor {shown(tensor)} is in {names}")
                self._files[tensor] = file
        self._read: set[str] = set()
        self._is_ernie = any(name.startswith("ernie.") for name in self._files)

    def _file_names(self) -> list[str]:
        index = self.path / "model.safetensors.index.json"
        if os.path.lexists(index):
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
                raise CheckpointError(f"{index}: expected a weight_map of tensor name to file name")
            names = sorted(set(weight_map.values()))
            if not 1 <= len(names) <= MAX_FILES:
                raise CheckpointError(f"{index}: weight_map: expected 1 to {MAX_FILES} files, got {len(names)}")
            for name in names:
                # The index is part of the checkpoint: it may not lead out of it.
                if pathlib.PurePath(name).name != name or len(name) > MAX_NAME_CHARS:
                    raise CheckpointError(f"{index}: expected plain file names, got {shown(name)}")
            return names
        names = sorted(p.name for p in self.path.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"{self.path}: expected *.safetensors files, found none (no other format is read)")
        return names

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """Return every tensor name, sorted."""
        return sorted(self._files)

    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(entry.end - entry.begin for file in self._open_files for entry in file.entries.values())

    def is_paddle_layout(self, name: str) -> bool:
        """Whether a matrix is stored [in, out], as Paddle does for ERNIE; files marked format=pt are [out, in]."""
        return self._is_ernie and self._files[name].metadata.get("format") != "pt"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is there."""
        return self._files[name].entries[name].shape

    def tensor(self, name: str, shape: tuple[int, ...]) -> Weights:
        """Return a tensor of exactly this shape as it lies in the file: float32, float16, bfloat16 bits (u16).

        float64 is narrowed to float32.

        Raises:
            CheckpointError: missing, of another shape, or not a floating-point tensor.
        """
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.path}: expected a tensor {name!r}, found none{suggest(name, self._files)}")
        self._read.add(name)
        entry = file.entries[name]
        if entry.shape != shape:
            raise CheckpointError(f"{file.path}: tensor {name!r}: expected shape {shape}, got {entry.shape}")
        if entry.dtype in ("BF16", "F16", "F32"):
            return file.tensor(name)
        if entry.dtype == "F64":
            return file.tensor(name).astype(np.float32)
        raise CheckpointError(f"{file.path}: tensor {name!r}: expected a floating-point dtype, got {entry.dtype}")

    def is_float8(self, name: str) -> bool:
        """Whether a tensor is there and is codes of e4m3."""
        return name in self._files and self._files[name].entries[name].dtype == "F8_E4M3"

    def float8(self, name: str, shape: tuple[int, int]) -> tuple[npt.NDArray[np.uint8], Weights]:
        """Return a matrix's codes of e4m3, u8 of exactly this shape, and their scales, one per block of 128 x 128.

        Raises:
            CheckpointError: it or its scales (`<name>_scale_inv`) are missing, or of another shape or type.
        """
        file = self._files[name]
        if file.entries[name].shape != shape:
            raise CheckpointError(
                f"{file.path}: tensor {name!r}: expected shape {shape}, got {file.entries[name].shape}"
            )
        self._read.add(name)
        rows, columns = (-(-size // FLOAT8_BLOCK) for size in shape)
        return file.tensor(name).view(np.uint8), self.tensor(f"{name}_scale_inv", (rows, columns))

    def unread(self) -> list[str]:
        """Return the names of the tensors that nobody has asked for yet, sorted."""
        return sorted(self._files.keys() - self._read)

    def identity(self) -> dict[str, Any]:
        """Return JSON values that tell the checkpoint from others; of the tensors only samples are read."""
        files = {file.path.name: file.identity() for file in self._open_files}
        return {"config": self.config_digest(), "files": files}

    def config_digest(self) -> str:
        """Return a digest of config.json's values."""
        return hashlib.blake2b(json.dumps(self.config).encode(), digest_size=16).hexdigest()

    def spans(self, num_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield all bytes of the tensors' files, in the order of their names; see SafetensorsFile.spans."""
        for file in self._open_files:
            yield from file.spans(num_bytes)

    def is_unchanged(self) -> bool:
        """Whether the files of the tensors are still those that were opened."""
        return all(file.is_unchanged() for file in self._open_files)

    def mode(self) -> int:
        """Return the permissions that all files of the tensors have in common."""
        return functools.reduce(operator.and_, (file.mode for file in self._open_files), 0o666)

    def release(self, names: Iterable[str]) -> None:
        """Give the memory of tensors that were read back to the system; reading them again maps the file again."""
        for name in names:
            self._files[name].release(name)
