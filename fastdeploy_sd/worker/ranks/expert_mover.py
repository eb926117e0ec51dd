"""Brings the experts of a rank to those that it shall have, while tokens are computed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from fastdeploy_sd.device.expert_service import ExpertService, ExpertSlot
from fastdeploy_sd.models.layers.linear import ExpertMemory

_log = logging.getLogger(__name__)

_LOOK_S = 0.05
_JOBS_S = 1.0


class ExpertMover:
    """Reads the target of every layer, packs what is missing into empty slots, and frees slots of what is not in it.

    Who says the target says it so that each expert is served by some rank while others free it.

    Attributes:
        num_moves: experts packed so far. last_s: seconds of the last one.
    """

    def __init__(self, service: ExpertService, memory: Mapping[int, ExpertMemory]) -> None:
        self._service, self._memory = service, memory
        self._places: dict[int, list[ExpertSlot]] = {layer: list(one.places) for layer, one in memory.items()}
        self.num_moves, self.last_s = 0, 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fdsd-experts", daemon=True)

    def start(self) -> None:
        """Follow the target until the service is closed."""
        self._service.on_close.append(self.close)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the expert that it packs. May be called twice."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def follow(self) -> None:
        """Make one pass over the layers."""
        for layer in self._memory:
            target = self._service.target(layer)
            if (target >= 0).any() and not self._is_over.is_set():
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
        begin = time.monotonic()
        self._service.set_slot(layer, slot, None)  # its memory is written now
        place = self._memory[layer].pack(expert, self._places[layer][slot])
        self._places[layer][slot] = place
        self._service.set_slot(layer, slot, place)
        self._service.publish(layer, slot)
        self.num_moves, self.last_s = self.num_moves + 1, time.monotonic() - begin

    def _move_out(self, layer: int, slot: int) -> None:
        version = self._service.retire(layer, slot)
        while not self._is_over.is_set() and not self._service.wait_older_jobs(version, _JOBS_S):
            pass

    def _run(self) -> None:
        try:
            while not self._is_over.wait(_LOOK_S):
                self.follow()
        except Exception:
            _log.exception("experts of rank %d stay where they are", self._service.rank)
