"""Brings the experts of a rank to those that it shall have, while tokens are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.device.expert_types import ExpertSlot

if TYPE_CHECKING:  # brings in Paddle
    from fastdeploy_sd.models.layers.linear import ExpertMemory

_JOBS_S = 1.0


class ExpertMover:
    """Reads the target of every layer, packs what is missing into empty slots, and frees slots of what is not in it.

    Who says the target says it so that each expert is served by some rank while others free it.
    """

    def __init__(self, service: ExpertService, memory: Mapping[int, ExpertMemory]) -> None:
        self._service, self._memory = service, memory
        self._places: dict[int, list[ExpertSlot]] = {layer: list(one.places) for layer, one in memory.items()}

    def start(self) -> None:
        """Follow the target until the service is closed."""
        self._service.repeat(self.follow, "expert mover")

    def follow(self) -> None:
        """Make one pass over the layers."""
        for layer in self._memory:
            target = self._service.target(layer)
            if (target >= 0).any() and not self._service.is_closing.is_set():
                wanted = [int(expert) for expert in target[self._service.rank] if expert >= 0]
                self._reach(layer, wanted)

    def _reach(self, layer: int, wanted: Sequence[int]) -> None:
        own = self._service.placement(layer)[self._service.rank].tolist()
        for expert in wanted:
            if expert in own:
                continue
            if -1 not in own:
                break
            slot = own.index(-1)
            self._move_in(layer, slot, expert)
            own[slot] = expert
        for slot, expert in enumerate(own):
            if expert >= 0 and expert not in wanted:
                self._move_out(layer, slot)

    def _move_in(self, layer: int, slot: int, expert: int) -> None:
        self._service.set_slot(layer, slot, None)  # its memory is written now
        place = self._memory[layer].pack(expert, self._places[layer][slot])
        self._places[layer][slot] = place
        self._service.set_slot(layer, slot, place)
        self._service.publish(layer, slot)

    def _move_out(self, layer: int, slot: int) -> None:
        version = self._service.retire(layer, slot)
        while not self._service.wait_older_jobs(version, _JOBS_S):
            if self._service.is_closing.is_set():
                return  # jobs may still ask for it
        self._service.set_slot(layer, slot, None)
