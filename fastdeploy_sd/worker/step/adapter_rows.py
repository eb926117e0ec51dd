"""LoRA adapters of a step: put into their places as plans ask for it, and told to the pass by row."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol

from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.errors import BadRequest, CheckpointError, shown
from fastdeploy_sd.models.adapters import ReadAdapter
from fastdeploy_sd.process.background import BackgroundCalls
from fastdeploy_sd.types import AdapterLoad, AdapterSource
from fastdeploy_sd.worker.ranks import commands
from fastdeploy_sd.worker.ranks.coordinator import GroupEnded, OtherRanks
from fastdeploy_sd.worker.step.request_table import RequestTable

_log = logging.getLogger(__name__)


class AdapterMemory(Protocol):
    """The memory of adapters, besides a model's weights; see models.adapters."""

    def digest(self, folder: Path) -> str: ...

    def read(self, folder: Path) -> ReadAdapter: ...

    def fill(self, slot: int, adapter: ReadAdapter) -> None: ...


class AdapterRows:
    """Has each row run with the adapter of its request; reads adapters, see interfaces.executor.AdapterReader.

    An adapter that cannot be loaded fails the rows that need it, as `build` raises until a part of the step has none.

    Args:
        adapters: of the model.
        memory, table: of the steps.
        others: the other ranks, which read their parts at the same time; None = there are none, or this is one of them.
    """

    def __init__(
        self, adapters: AdapterMemory, memory: StepMemory, table: RequestTable, others: OtherRanks | None = None
    ) -> None:
        self._adapters, self._memory, self._table, self._others = adapters, memory, table, others
        self._calls, self._reads = BackgroundCalls(), dict[int, Future[ReadAdapter]]()
        self.fd: int | None = self._calls.fd
        self.digest, self.close = adapters.digest, self._calls.close
        self._failed: dict[int, Exception] = {}

    def begin(self, load: AdapterLoad) -> bool:
        if self._others is not None:
            self._others.post(commands.ReadAdapter(load))
            with contextlib.suppress(GroupEnded):  # the next step says so
                self._others.flush()
        read = partial(self._adapters.read, Path(load.source.folder))
        self._reads[load.slot] = self._calls.start(read, "fdsd-adapter")
        return True

    def take_read(self) -> list[int]:
        ended = self._calls.take()
        return [slot for slot, call in self._reads.items() if call in ended] if ended else []

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        """Put adapters that were read into their places, in which no row of this step or a later one needs another.

        What is still being read, as it may be on other ranks, is waited for.
        """
        for load in loads:
            self._failed.pop(load.slot, None)
            try:
                self._load(load.slot, load.source)
            except Exception as error:
                _log.exception("adapter %s could not be loaded", load.source.adapter.name)
                self._failed[load.slot] = error

    def build(self) -> None:
        """Write the place of the adapter of each token of the step in the memory. Raises as loading one of them did."""
        m = self._memory
        slots = self._table.adapter_slots.take(m.table_rows[: m.num_requests])
        if self._failed:
            for slot in slots.tolist():
                if slot in self._failed:
                    raise self._failed[slot]
        m.adapter_slots[: m.num_tokens] = slots.repeat(m.num_new[: m.num_requests])

    def _load(self, slot: int, source: AdapterSource) -> None:
        call = self._reads.pop(slot)
        try:
            adapter = call.result()
        except CheckpointError as error:
            raise BadRequest(f"model: adapter {shown(source.adapter.name)}: {error.message}", param="model") from None
        if adapter.digest != source.adapter.digest:
            text = f"the files of adapter {shown(source.adapter.name)} have changed since it was loaded: load it again"
            raise BadRequest(f"model: {text}", param="model", code="adapter_changed")
        self._adapters.fill(slot, adapter)
