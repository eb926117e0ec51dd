"""LoRA adapters of an engine: which requests may name, and which are in the model's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from fastdeploy_sd.config.lora_section import LoraConfig, name_fault
from fastdeploy_sd.engine.interfaces.executor import AdapterReader
from fastdeploy_sd.errors import BadRequest, CheckpointError, ConfigError, NotFound, shown
from fastdeploy_sd.types import Adapter, AdapterLoad, AdapterSource

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 256
ReadDigest = Callable[[], str]


class AdapterRegistry:
    """The adapters by name; a request finds its own by digest.

    Args:
        reader: of the model, None = it takes no adapters.
        names: of the model, which no adapter may have.

    Raises ConfigError: a configured adapter is wrong.
    """

    def __init__(self, config: LoraConfig, reader: AdapterReader | None, names: tuple[str, ...] = ()) -> None:
        self.reader, self._reserved = reader, set(names)
        self._by_name: dict[str, AdapterSource] = {}
        self._num_begun = 0
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
        """Let requests name an adapter, after having read its files.

        Raises BadRequest as `begin`, CheckpointError: the files are not those of an adapter of this model.
        """
        return self.end(name, folder, self.begin(name, folder))

    def begin(self, name: str, folder: Path) -> ReadDigest:
        """Keep a name for an adapter, and return what reads it. Any thread may call that, `end` is to be called then.

        Raises BadRequest: the name is in use or is none, or there are too many.
        """
        if self.reader is None:
            raise BadRequest("lora_name: expected a server with enable_lora, got one without", param="lora_name")
        if fault := name_fault(name):
            raise BadRequest(f"lora_name: {fault}", param="lora_name")
        if name in self._by_name or name in self._reserved:
            raise name_in_use(name)
        if len(self._by_name) + self._num_begun >= MAX_ADAPTERS:
            raise BadRequest(f"lora_name: expected at most {MAX_ADAPTERS} adapters, got one more", param="lora_name")
        self._num_begun += 1
        self._reserved.add(name)
        return partial(self.reader.digest, folder)

    def end(self, name: str, folder: Path, digest: ReadDigest) -> AdapterSource:
        """Let requests name an adapter whose digest this returns; what it raises is raised here."""
        self._num_begun -= 1
        self._reserved.remove(name)
        found = self._by_name[name] = AdapterSource(Adapter(name, digest()), str(folder))
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
        num_users: requests that have it.
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
    it, the least recently used first. An adapter is read while steps run: the request that needs it first has the place
    and waits in the queue, and so do others with the same adapter.

    `reader`: None = nothing needs to be read.
    """

    def __init__(self, num_slots: int, reader: AdapterReader | None = None) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._num_uses, self._reader = 0, reader
        self._unread: dict[str, int] = {}  # digest -> place

    def has_room(self, source: AdapterSource | None) -> bool:
        """Whether a request with this adapter could have a place for it now."""
        return source is None or self._place_of(source) is not None

    def is_read(self, user: AdapterUser) -> bool:
        """Whether the adapter of a request is not being read now."""
        return user.adapter is None or user.adapter.adapter.digest not in self._unread

    def has_place(self, user: AdapterUser) -> bool:
        """Whether a request needs no further place, and its adapter is not being read now."""
        return (user.adapter is None or user.adapter_slot >= 0) and self.is_read(user)

    def begin(self, user: AdapterUser) -> bool:
        """Have the adapter of a waiting request read if no place has it; returns whether it may have a seat now.

        There must be room.
        """
        source = user.adapter
        if source is None or user.adapter_slot >= 0 or not self.is_read(user):
            return self.is_read(user)
        place = self._place_of(source)
        assert place is not None, "no place for an adapter"
        slot = self._slots[place]
        if slot.source is not None and slot.source.adapter.digest == source.adapter.digest:
            return True
        self._slots[place] = _Slot(source)
        self.enter(user)
        if self._reader is None or not self._reader.begin(AdapterLoad(place, source)):
            return True
        self._unread[source.adapter.digest] = place
        return False

    def take_read(self) -> None:
        """Let requests go on whose adapters have been read, also those whose adapters cannot be."""
        places = () if self._reader is None else self._reader.take_read()
        if places:
            self._unread = {digest: place for digest, place in self._unread.items() if place not in places}

    def enter(self, user: AdapterUser) -> None:
        """Have a request that gets a seat use the place of its adapter, if it has not begun to; see `begin`."""
        if user.adapter is None or user.adapter_slot >= 0:
            return
        place = self._place_of(user.adapter)
        assert place is not None, "no place for an adapter"
        slot = self._slots[place]
        slot.num_users += 1
        self._num_uses += 1
        slot.last_used, user.adapter_slot = self._num_uses, place

    def leave(self, user: AdapterUser, *, has_failed: bool = False) -> None:
        """A request needs its place no more; after a failure its adapter is read again for the next one."""
        place, user.adapter_slot = user.adapter_slot, -1
        if place < 0:
            return
        slot = self._slots[place]
        slot.num_users -= 1
        slot.is_suspect |= has_failed
        assert slot.source is not None, "a place in use without an adapter"
        if not slot.num_users and (slot.is_suspect or self._unread.pop(slot.source.adapter.digest, None) is not None):
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
        """Verify that these are the places in use, one for each request, -1 = it uses none."""
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
