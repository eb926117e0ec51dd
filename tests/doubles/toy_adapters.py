"""Adapters of the toy model: folders that a test says are there, and the digests of what is in them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastdeploy_sd.config import Config
from fastdeploy_sd.config.lora_section import LoraConfig
from fastdeploy_sd.errors import CheckpointError
from fastdeploy_sd.types import Adapter, AdapterLoad


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
    """See AdapterReader.

    Attributes:
        contents: of folders; None = each has its name in it.
        slow: folders that take until `end_reading`.
        begun: place -> what is read for it, and how many steps that takes.
        delay: how many steps others take; None = none.
    """

    contents: dict[str, str] | None = None
    read: list[str] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)
    delay: Callable[[], int] | None = None
    fd: int | None = None
    begun: dict[int, tuple[str, int]] = field(default_factory=dict)

    def digest(self, folder: Path) -> str:
        self.read.append(str(folder))
        if self.contents is None:
            return digest_of(str(folder))
        if str(folder) not in self.contents:
            raise CheckpointError(f"{folder}: expected adapter_config.json, got nothing")
        return digest_of(self.contents[str(folder)])

    def begin(self, load: AdapterLoad) -> bool:
        name, steps = load.source.folder, 0 if self.delay is None else self.delay()
        self.begun.pop(load.slot, None)
        if name in self.slow or steps:
            self.begun[load.slot] = name, steps
        return load.slot in self.begun

    def end_reading(self, folder: str) -> None:
        self.slow.discard(folder)

    def take_read(self) -> list[int]:
        ended = []
        for slot, (name, steps) in list(self.begun.items()):
            self.begun[slot] = name, steps - 1
            if name not in self.slow and steps <= 1:
                del self.begun[slot]
                ended.append(slot)
        return ended
