"""A checkpoint directory: config.json and the tensors of one or many safetensors files. Executes nothing from it."""

from __future__ import annotations

import functools
import operator
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from fastdeploy_sd.errors import CheckpointError, shown
from fastdeploy_sd.models.checkpoint.fields import MAX_I32, FieldReader, Integer, is_token_id
from fastdeploy_sd.models.checkpoint.quantization import read_storages
from fastdeploy_sd.models.gguf.container import GgufFile
from fastdeploy_sd.models.gguf.names import Named, name_tensors
from fastdeploy_sd.models.gguf.order import DeltaHeads
from fastdeploy_sd.models.weights.mapped_file import MappedFile
from fastdeploy_sd.models.weights.safetensors import SafetensorsFile
from fastdeploy_sd.models.weights.source import ModelSource, TensorInfo, Weights
from fastdeploy_sd.models.weights.storages.registry import Storage
from fastdeploy_sd.process.files import read_json
from fastdeploy_sd.types import Bytes

CONFIG_NAME = "config.json"
MAX_FILES, MAX_NAME_CHARS = 10_000, 255
MAX_EOS_TOKEN_IDS = 1024
_DELTA_SIZES = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
_HEADS = {name: Integer(1, MAX_I32) for name in ("num_attention_heads", "num_key_value_heads", *_DELTA_SIZES)}


class Checkpoint(ModelSource):
    """A ModelSource of a directory.

    Raises CheckpointError: no such directory or config.json, no safetensors, or weights in a storage that is not read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        config, storages = _read_config(path)
        self._files: dict[str, MappedFile] = {}
        self._renamed: dict[str, Named] = {}
        tensors: dict[str, TensorInfo] = {}
        paths = [] if any(path.glob("*.safetensors")) else sorted(path.glob("*.gguf"))
        self._open_files: list[MappedFile] = (
            [GgufFile(file) for file in paths]
            if paths
            else [SafetensorsFile(path / name) for name in _file_names(path)]
        )
        for file in self._open_files:
            for named in _named_tensors(file, self._open_files[0], config):
                if named.name in tensors:
                    names = f"{tensors[named.name].path.name} and {file.path.name}"
                    raise CheckpointError(f"{path}: tensor {shown(named.name)} is in {names}")
                self._files[named.name], tensors[named.name] = file, named.entry
                self._renamed[named.name] = named
        super().__init__(path, tensors, path / CONFIG_NAME, config)
        self.storages = storages
        self._is_ernie = any(name.startswith("ernie.") for name in tensors)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return generation_config.json's, else config.json's, else none."""
        path = self.path / "generation_config.json"
        values = read_json(path, missing_ok=True)
        if "eos_token_id" not in values:
            path, values = self.config_path, self.config
            text = values.get("text_config")  # of a model for text and pictures
            values = text if "eos_token_id" not in values and isinstance(text, dict) else values
        value = values.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if len(ids) > MAX_EOS_TOKEN_IDS or not all(map(is_token_id, ids)):
            expected = f"at most {MAX_EOS_TOKEN_IDS} token ids from 0 to {MAX_I32}"
            raise CheckpointError(f"{path}: eos_token_id: expected {expected}, got {shown(value)}")
        return tuple(ids)

    def is_transposed(self, name: str) -> bool:
        """Paddle stores ERNIE's matrices so, not its embedding; files marked format=pt hold [out, in]."""
        file = self._files[name]
        is_paddle = self._is_ernie and isinstance(file, SafetensorsFile) and file.metadata.get("format") != "pt"
        return is_paddle and not name.endswith("embed_tokens.weight")

    def columns(self, name: str) -> tuple[range, ...]:
        return self._renamed[name].columns if name in self._renamed else ()

    def identity(self) -> dict[str, Any]:
        files = {file.path.name: file.identity() for file in self._open_files}
        return {"config": self.config_digest(), "files": files}

    def spans(self, num_bytes: int) -> Iterator[Bytes]:
        for file in self._open_files:
            yield from file.spans(num_bytes)

    def is_unchanged(self) -> bool:
        return all(file.is_unchanged() for file in self._open_files)

    def mode(self) -> int:
        return functools.reduce(operator.and_, (file.mode for file in self._open_files), 0o666)

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            self._files[name].release(self.tensors[name])

    def _tensor(self, name: str) -> Weights:
        data = self._files[name].read(self.tensors[name])
        change = self._renamed[name].change
        return data if change is None else change(data, f"{self.tensors[name].path}: tensor {name!r}")


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Return config.json of a checkpoint whose weights can be read.

    Raises CheckpointError: no such folder, no readable config.json, or weights in a storage that is not read.
    """
    return _read_config(folder)[0]


def _read_config(folder: pathlib.Path) -> tuple[dict[str, Any], tuple[Storage, ...]]:
    if not folder.is_dir():
        raise CheckpointError(f"model: expected a checkpoint directory, got {str(folder)!r}", param="model")
    config = read_json(folder / CONFIG_NAME)
    return config, read_storages(folder, config)


def _named_tensors(file: MappedFile, first: MappedFile, config: dict[str, Any]) -> Iterator[Named]:
    if not isinstance(first, GgufFile):
        return (Named(name, entry) for name, entry in file.entries.items())
    reader = FieldReader(config, _HEADS, str(first.path))
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    has_delta = _DELTA_SIZES[0] in config
    delta = DeltaHeads(*map(reader.integer, _DELTA_SIZES)) if has_delta else None
    return name_tensors(file.entries, str(first.metadata["general.architecture"]), heads, kv_heads, delta)


def _file_names(path: pathlib.Path) -> list[str]:
    index = path / "model.safetensors.index.json"
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
    names = sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{path}: expected *.safetensors files, found none (no other format is read)")
    return names
