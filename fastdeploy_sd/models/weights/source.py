"""Where weights come from: named tensors of a shape, a type and bytes. Knows no format of a kernel."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import CheckpointError, suggest
from fastdeploy_sd.types import Bytes

if TYPE_CHECKING:
    from fastdeploy_sd.models.weights.storages.registry import Storage

Weights = npt.NDArray[np.generic]  # float32, float16, or bfloat16 as u16 bits; codes as their storage has them
FLOATS = ("BF16", "F16", "F32", "F64")
ONE_NUMBER = ((), (1,), (1, 1))  # shapes of a tensor that holds one


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read: its type as safetensors names it, and its bytes in its file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class WeightSource(ABC):
    """Named tensors, wherever they lie; `path` is the folder's or file's.

    Attributes:
        storages: in which a description of the source says that weights are.
    """

    storages: Sequence[Storage] = ()

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.path, self.tensors = path, tensors
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def num_bytes(self) -> int:
        return sum(info.end - info.begin for info in self.tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def tensor(self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS) -> Weights:
        """Return a tensor of exactly this shape as it is stored; float64 is narrowed to float32.

        Raises CheckpointError: missing, of another shape, or of none of these types.
        """
        info = self._info(name)
        self._read.add(name)
        if info.shape != shape:
            raise CheckpointError(f"{info.path}: tensor {name!r}: expected shape {shape}, got {info.shape}")
        if info.dtype not in dtypes:
            expected = "a floating-point dtype" if dtypes is FLOATS else f"dtype {' or '.join(dtypes)}"
            raise CheckpointError(f"{info.path}: tensor {name!r}: expected {expected}, got {info.dtype}")
        data = self._tensor(name)
        return data.astype(np.float32) if info.dtype == "F64" else data

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: expected a tensor {name!r}, found none{suggest(name, self.tensors)}")
        return info

    def unread(self) -> list[str]:
        """Return the names of the tensors that were not asked for yet, sorted."""
        return sorted(self.tensors.keys() - self._read)

    @abstractmethod
    def _tensor(self, name: str) -> Weights:
        """Return a tensor as it is stored, read-only."""

    @abstractmethod
    def is_transposed(self, name: str) -> bool:
        """Whether a matrix is stored [in, out]."""

    def columns(self, name: str) -> Sequence[range]:
        """Return the stored columns of a matrix in the order that it has; none = they are in order."""
        return ()

    @abstractmethod
    def release(self, names: Iterable[str]) -> None:
        """Give the memory of tensors that were read back to the system; they can be read again."""

    @abstractmethod
    def spans(self, num_bytes: int) -> Iterator[Bytes]:
        """Yield all bytes of the tensors' files in a fixed order, `num_bytes`, a multiple of a page, at a time."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return JSON values that tell these tensors from others; of the tensors only samples are read."""

    @abstractmethod
    def is_unchanged(self) -> bool:
        """Whether the tensors' files are still those that were opened."""

    @abstractmethod
    def mode(self) -> int:
        """Return the permissions that all files of the tensors have in common."""


class ModelSource(WeightSource):
    """A model: its weights and its config, which one file may hold together. Tokenizer files lie in `path`.

    The config is in the words of Hugging Face's config.json; errors name `config_path`, the file that holds it.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorInfo], config_path: Path, config: dict[str, Any]
    ) -> None:
        super().__init__(path, tensors)
        self.config_path, self.config = config_path, config

    @abstractmethod
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that end generation; raises CheckpointError where they are no token ids."""

    def config_digest(self) -> str:
        return hashlib.blake2b(json.dumps(self.config).encode(), digest_size=16).hexdigest()
