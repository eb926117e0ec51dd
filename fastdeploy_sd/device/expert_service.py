"""Experts that ranks of one host share: each rank runs its own for the tokens of all, whenever they come."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.expert_types import ExpertLayer, ExpertRunner, ExpertSlot
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call
from fastdeploy_sd.types import I32, I64

_log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
# Between two calls of `ExpertService.repeat`.
_PAUSE_S = 0.05
# By ExpertRankState.
STATES = ("absent", "loading", "serving", "leaving", "gone")


def expert_segment() -> int:
    """Return the descriptor of a new segment, to be handed to all ranks and closed; the first that opens it sizes it.

    It has no name: nothing is left of it when the last process that has it ends, however that ends.
    """
    return os.memfd_create("fdsd-experts", os.MFD_CLOEXEC)


@dataclass(frozen=True, slots=True)
class ServiceShape:
    """What all ranks' services have in common. Where layers differ, the greatest of all layers.

    Attributes:
        num_slots: places for an expert's weights, of the rank with most.
        row_bytes: of a row of x.
        max_tokens: of a step; where their results take more than 64 MiB, they go in rounds.
    """

    num_ranks: int
    num_layers: int
    num_experts: int
    num_slots: int
    top_k: int
    hidden_size: int
    row_bytes: int
    max_tokens: int

    @property
    def num_bytes(self) -> int:
        """Of the segment; memory is taken as it is used. Raises ValueError: a size is out of its range."""
        found = ctypes.c_int64()
        _call("bytes", **self.params(), num_bytes=ctypes.addressof(found))
        return found.value

    def params(self) -> dict[str, int]:
        """Return the values of ExpertServiceShape."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_EMPTY = ExpertSlot(-1, 0, 0)


class ExpertService:
    """One rank's part. Ops take its handle; one thread runs them. All else may be called by any thread.

    Attributes:
        handle: 1 or more; -1 once closed.
        kept: what lives as long as the service: the memory of weights.
        layers: what was registered, by number.
        is_closing: set when the threads of `repeat` shall end.
    """

    def __init__(self, handle: int, rank: int, shape: ServiceShape) -> None:
        self.handle, self.rank, self.shape = handle, rank, shape
        self.kept: list[object] = []
        self.layers: dict[int, ExpertLayer] = {}
        self.is_closing = threading.Event()
        self._runner: ExpertRunner | None = None
        self._is_open = threading.Lock()  # a watch may abort what another thread closes
        self._threads: list[threading.Thread] = []

    @classmethod
    def open(cls, fd: int, rank: int, shape: ServiceShape, timeout_s: float = TIMEOUT_S) -> ExpertService:
        """Return a service that is loading. A rank that is started again opens the same segment.

        Args:
            fd: of an `expert_segment`; may be closed afterwards.
            timeout_s: how long combine_experts waits for a rank; time in which this process is stopped does not count.

        Raises ValueError: another shape than the other ranks'.
        """
        handle = ctypes.c_int32()
        address = ctypes.addressof(handle)
        _call("open", **shape.params(), file=fd, rank=rank, timeout_s=timeout_s, service=address)
        return cls(handle.value, rank, shape)

    def open_params(self, fd: int, timeout_s: float) -> Any:
        """Return what it was opened with and its handle, for a library whose functions run its experts."""
        handle = ctypes.c_int32(self.handle)
        values = self.shape.params() | {"file": fd, "rank": self.rank, "timeout_s": timeout_s}
        params = struct_type("ExpertServiceOpenParams")(**values, service=ctypes.addressof(handle))
        params.handle = handle  # kept alive
        return params

    def run_on(self, address: int, runner: ExpertRunner) -> None:
        """Have experts run by the functions of an ExpertRunner at this address; before any layer is registered."""
        self._call("runner", runner=address)
        self._runner = runner

    def register_layer(self, layer: int, what: ExpertLayer, slots: Sequence[ExpertSlot | None]) -> None:
        """Say what lies in this rank's slots; before `start`. None = nothing yet. The caller keeps the memory alive."""
        self._call("layer", layer=layer, **what.params())
        self.layers[layer] = what
        for slot, found in enumerate(slots):
            self.set_slot(layer, slot, found)

    def start(self) -> None:
        """Publish the slots that have an expert, and serve from now on, also what an earlier incarnation was asked."""
        self._call("start")

    def wait_until_all_serve(self, timeout_s: float) -> None:
        """Raises ValueError: a rank does not in time; the text names it."""
        self._call("meet", timeout_s=timeout_s)

    def abort(self) -> None:
        """Make what this process waits for fail, at once and for ever. After `close`, and while it runs, too."""
        with self._is_open:
            if self.handle >= 0:
                self._call("abort")
                if self._runner is not None:
                    self._runner.abort()

    def leave(self, timeout_s: float) -> None:
        """Serve until no other rank serves: each leaves too, is gone, or is loading. Then this one is gone.

        Raises ValueError: a rank does not in time; the text names it. It may be called again.
        """
        self._call("leave", timeout_s=timeout_s)

    def begin_drain(self, ranks: range) -> None:
        """Say that ranks end with the requests that they have: what they wait for of a rank that is loading fails at
        once. After `close`, and while it runs, too.
        """
        with self._is_open:
            if self.handle >= 0:
                self._call("drain", first_rank=ranks.start, num_ranks=len(ranks))

    def mark_gone(self, rank: int) -> None:
        """Say that a rank has ended for good: who waits for its experts fails, unless others have them."""
        self._call("gone", rank=rank)

    def close(self) -> None:
        """Give the handle back. No op may run on it, then or later."""
        self.is_closing.set()
        for thread in self._threads:
            thread.join()
        with self._is_open:
            self._call("close")
            self.handle = -1
        if self._runner is not None:
            self._runner.close()
        self.kept.clear()

    @property
    def incarnation(self) -> int:
        """How often this rank has opened the segment."""
        return int(self._ranks()[1][self.rank])

    def states(self) -> tuple[str, ...]:
        """Return the state of every rank, one of STATES; of one whose process has ended "loading" or "gone"."""
        return tuple(STATES[state] for state in self._ranks()[0])

    @property
    def has_lost_experts(self) -> bool:
        """Whether the last op of this rank failed because a rank did not run its experts."""
        return self._ranks()[2] if self._runner is None else self._runner.has_lost_experts

    def _ranks(self) -> tuple[I32, I32, bool]:
        states, incarnations = np.zeros((2, self.shape.num_ranks), np.int32)
        is_lost = ctypes.c_int32()
        addresses = {"incarnations": incarnations.ctypes.data, "is_lost": ctypes.addressof(is_lost)}
        self._call("ranks", states=states.ctypes.data, **addresses)
        return states, incarnations, bool(is_lost.value)

    def awaited(self) -> npt.NDArray[np.bool_]:
        """Return bool[num_ranks, num_ranks]: whether the rank of the row waits for that of the column."""
        found: I32 = np.empty((self.shape.num_ranks, self.shape.num_ranks), np.int32)
        self._call("awaited", is_awaited=found.ctypes.data)
        awaited: npt.NDArray[np.bool_] = found != 0
        return awaited

    def placement(self, layer: int, *, has_retired: bool = False) -> I32:
        """Return the published expert i32[num_ranks, num_slots] of each slot, -1 = none.

        `has_retired`: with those that are still run where they were asked for before.
        """
        experts: I32 = np.empty((self.shape.num_ranks, self.shape.num_slots), np.int32)
        self._call("placement", layer=layer, has_retired=has_retired, experts=experts.ctypes.data)
        return experts

    def target(self, layer: int) -> I32:
        """Return the experts i32[num_ranks, num_slots] that each rank shall have, -1 = none; all -1: not said yet."""
        experts: I32 = np.empty((self.shape.num_ranks, self.shape.num_slots), np.int32)
        self._call("target", layer=layer, is_new=False, experts=experts.ctypes.data)
        return experts

    def set_target(self, layer: int, experts: I32) -> None:
        """Say which experts each rank shall have, in any order; each rank reaches that by itself."""
        if experts.shape != (self.shape.num_ranks, self.shape.num_slots):
            raise ValueError(f"experts: expected one per slot of every rank, got an array {list(experts.shape)}")
        table = np.ascontiguousarray(experts, np.int32)
        self._call("target", layer=layer, is_new=True, experts=table.ctypes.data)

    def repeat(self, step: Callable[[], object], name: str) -> None:
        """Call `step` again and again in a thread of this name, until the service is closed or `step` raises."""

        def run() -> None:
            try:
                while not self.is_closing.wait(_PAUSE_S):
                    step()
            except Exception:
                _log.exception("%s of rank %d has ended", name, self.rank)

        self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        self._threads[-1].start()

    def set_slot(self, layer: int, slot: int, what: ExpertSlot | None) -> None:
        """Say what lies in a slot of this rank; not yet published. None = nothing: its memory may then be written.

        Waits for the experts that run. A rank that asks for another expert there is told to ask anew.
        """
        values = {field.name: getattr(what or _EMPTY, field.name) for field in fields(ExpertSlot)}
        self._call("slot", layer=layer, slot=slot, **values)

    def publish(self, layer: int, slot: int) -> int:
        """Let ranks ask for the expert in a slot of this rank; returns the table's number from now on."""
        return self._publish(layer, slot, True)

    def retire(self, layer: int, slot: int) -> int:
        """As `publish`, of the opposite. What was asked for before is still run."""
        return self._publish(layer, slot, False)

    def _publish(self, layer: int, slot: int, is_published: bool) -> int:
        version = ctypes.c_int64()
        address = ctypes.addressof(version)
        self._call("publish", layer=layer, slot=slot, is_published=is_published, version=address)
        return version.value

    def wait_older_jobs(self, version: int, timeout_s: float) -> bool:
        """Wait until no rank has a job that was made from an older table; returns False where one still has."""
        is_over = ctypes.c_int32()
        self._call("older_jobs", version=version, timeout_s=timeout_s, is_over=ctypes.addressof(is_over))
        return bool(is_over.value)

    def counts(self) -> I64:
        """Return the rows i64[num_layers, num_experts] that each expert has had so far, of all ranks."""
        rows: I64 = np.empty((self.shape.num_layers, self.shape.num_experts), np.int64)
        self._call("counts", rows=rows.ctypes.data)
        return rows

    def served(self) -> I64:
        """Return the rows i64[num_ranks, num_layers] that each rank has run its experts on so far."""
        served: I64 = np.empty((self.shape.num_ranks, self.shape.num_layers), np.int64)
        self._call("counts", served=served.ctypes.data)
        return served

    def _call(self, name: str, **values: Any) -> None:
        _call(name, service=self.handle, **values)


# Calls whose struct has another's.
_STRUCTS = dict.fromkeys(("start", "meet", "leave", "abort", "close"), "Wait")


def _call(name: str, **values: Any) -> None:
    struct = _STRUCTS.get(name) or "".join(map(str.capitalize, name.split("_")))
    call(f"expert_service_{name}", struct_type(f"ExpertService{struct}Params")(**values))
