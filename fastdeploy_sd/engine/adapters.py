"""LoRA adapters of an engine: which requests may name, and which are in the model's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fastdeploy_sd.config.lora_section import LoraConfig, name_fault
from fastdeploy_sd.errors import BadRequest, CheckpointError, ConfigError, NotFound, shown
from fastdeploy_sd.types import Adapter, AdapterLoad, AdapterSource

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 256
ReadDigest = Callable[[Path], str]


class AdapterRegistry:
    """The adapters by name; a request finds its own by digest.

    Args:
        read_digest: verifies an adapter's files and returns their digest, or raises CheckpointError; None = the model
            takes no adapters.
        names: of the model, which no adapter may have.

    Raises ConfigError: a configured adapter is wrong.
    """

    def __init__(self, config: LoraConfig, read_digest: ReadDigest | None, names: tuple[str, ...] = ()) -> None:
        self._read_digest, self._reserved = read_digest, frozenset(names)
        self._by_name: dict[str, AdapterSource] = {}
        for name, folder in config.modules:
            try:
                self.load(name, folder)
            except (BadRequest, CheckpointError) as error:
                text = f"lora_modules: {name}: {error.message}"
                raise ConfigError(text, param="lora_modules") from None

    @property
    def known(self) -> tuple[AdapterSource, ...]:
        """The adapters that requests may name now, in the order of their loading."""
        return tuple(self._by_name.values())

    def load(self, name: str, folder: Path) -> AdapterSource:
        """Let requests name an adapter.

        Raises BadRequest: the name is in use or is none, or there are too many; CheckpointError: the files are not
        those of an adapter of this model.
        """
        if self._read_digest is None:
            raise BadRequest("lora_name: expected a server with enable_lora, got one without", param="lora_name")
        if fault := name_fault(name):
            raise BadRequest(f"lora_name: {fault}", param="lora_name")
        if name in self._by_name or name in self._reserved:
            raise name_in_use(name)
        if len(self._by_name) >= MAX_ADAPTERS:
            raise BadRequest(f"lora_name: expected at most {MAX_ADAPTERS} adapters, got one more", param="lora_name")
        found = AdapterSource(Adapter(name, self._read_digest(folder)), str(folder))
        self._by_name[name] = found
        logger.info("adapter %s (%s) is loaded from %s", name, found.adapter.digest[:12], folder)
        return found

    def unload(self, name: str) -> AdapterSource:
        """Let new requests name an adapter no more; those that were taken go on. Raises NotFound."""
        source = self._by_name.pop(name, None)
        if source is None:
            raise NotFound(
                f"lora_name: expected a loaded adapter, got {shown(name)}", param="lora_name", code="adapter_not_loaded"
            )
        logger.info("adapter %s takes no new requests", name)
        return source

    def find(self, adapter: Adapter | None) -> AdapterSource | None:
        """Return where the adapter of a request is, None = the request has none. Raises NotFound: it is not loaded."""
        if adapter is None:
            return None
        for source in self._by_name.values():
            if source.adapter.digest == adapter.digest:
                return source
        text = f"model: expected an adapter that is loaded here, got {shown(adapter.name)} ({adapter.digest[:12]})"
        raise NotFound(text, param="model", code="adapter_not_loaded")


def name_in_use(name: str) -> BadRequest:
    """Return the error of an adapter that cannot have the name of a model or of another adapter."""
    text = f"lora_name: expected a name that is not in use, got {shown(name)}"
    return BadRequest(text, param="lora_name", code="adapter_loaded")


class AdapterUser(Protocol):
    """A request; see RequestState."""

    adapter: AdapterSource | None
    adapter_slot: int


@dataclass(slots=True)
class _Slot:
    """A place for an adapter.

    Attributes:
        num_users: requests with a seat.
        last_used: later places have higher numbers.
        is_told: whether the executor knows that it shall hold `source`.
        is_suspect: whether a request with it has failed, perhaps as the adapter could not be read.
    """

    source: AdapterSource | None = None
    num_users: int = 0
    last_used: int = 0
    is_told: bool = False
    is_suspect: bool = False


class AdapterSlots:
    """Which adapter each place in the model's memory holds.

    A request uses one as long as it has a seat. A place that is not in use keeps its adapter until another one needs
    it, the least recently used first.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._num_uses = 0

    def has_room(self, source: AdapterSource | None) -> bool:
        """Whether a request with this adapter could have a seat now."""
        return source is None or self._place_of(source) is not None

    def seat(self, user: AdapterUser) -> None:
        """Give the adapter of a request that gets a seat a place; there must be room."""
        source = user.adapter
        if source is None:
            return
        place = self._place_of(source)
        assert place is not None, "no place for an adapter"
        slot = self._slots[place]
        if slot.source is None or slot.source.adapter.digest != source.adapter.digest:
            self._slots[place] = slot = _Slot(source)
        slot.num_users += 1
        self._num_uses += 1
        slot.last_used, user.adapter_slot = self._num_uses, place

    def unseat(self, user: AdapterUser, *, has_failed: bool = False) -> None:
        """A request leaves its seat; after a failure its adapter is read again for the next one."""
        place, user.adapter_slot = user.adapter_slot, -1
        if place < 0:
            return
        slot = self._slots[place]
        slot.num_users -= 1
        slot.is_suspect |= has_failed
        if slot.is_suspect and not slot.num_users:
            self._slots[place] = _Slot()

    def take_load(self, place: int) -> AdapterLoad | None:
        """Return what the executor must do before a request in this place; None = nothing, or it was told before."""
        if place < 0 or self._slots[place].is_told:
            return None
        slot = self._slots[place]
        assert slot.source is not None, "a place in use without an adapter"
        slot.is_told = True
        return AdapterLoad(place, slot.source)

    def verify(self, places: list[int]) -> None:
        """Verify that these are the places in use, one for each request with a seat."""
        for place, slot in enumerate(self._slots):
            assert slot.num_users == places.count(place), f"place {place}: {slot.num_users} users, counted wrongly"

    def _place_of(self, source: AdapterSource) -> int | None:
        idle = None
        for place, slot in enumerate(self._slots):
            if slot.source is not None and slot.source.adapter.digest == source.adapter.digest:
                return place
            if not slot.num_users and (idle is None or slot.last_used < self._slots[idle].last_used):
                idle = place
        return idle
