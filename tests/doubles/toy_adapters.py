"""Adapters of the toy model: folders that a test says are there, and the digests of what is in them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastdeploy_sd.config import Config
from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.types import Adapter


def digest_of(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def adapter_of(name: str) -> Adapter:
    """The adapter of a request, from the folder of the same name with its name in it."""
    return Adapter(name, digest_of(name))


def with_adapters(config: Config, *names: str) -> Config:
    """Have a server begin with adapters in folders of their names."""
    return replace(config, lora=LoraConfig(True, tuple(f"{name}={name}" for name in names)))


@dataclass
class ToyAdapters:
    """See AdapterReader. `contents`: of folders; None = each has its name in it."""

    contents: dict[str, str] | None = None
    read: list[str] = field(default_factory=list)

    def digest(self, folder: Path) -> str:
        self.read.append(str(folder))
        if self.contents is None:
            return digest_of(str(folder))
        if str(folder) not in self.contents:
            raise CheckpointError(f"{folder}: expected adapter_config.json, got nothing")
        return digest_of(self.contents[str(folder)])
