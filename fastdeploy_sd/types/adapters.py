"""LoRA adapters: how requests name them, and how a worker gets them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that a request runs with.

    Attributes:
        name: the `model` of requests for it.
        digest: of its files, 16 to 64 bytes in hexadecimal digits: requests with equal ones get the same tokens,
            whatever the names.
    """

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter, and the folder with its files."""

    adapter: Adapter
    folder: str


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Puts an adapter into a place of the model's memory, before the requests of the same plan; as in AdapterSource."""

    slot: int
    source: AdapterSource
