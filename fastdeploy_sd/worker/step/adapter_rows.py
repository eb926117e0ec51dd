"""LoRA adapters of a step: put into their places as plans ask for it, and told to the pass by row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.engine.interfaces.executor import AdapterReader
from fastdeploy_sd.errors import BadRequest, CheckpointError, shown
from fastdeploy_sd.types import AdapterLoad, AdapterSource
from fastdeploy_sd.worker.step.request_table import RequestTable

_log = logging.getLogger(__name__)


class AdapterMemory(AdapterReader, Protocol):
    """The memory of adapters, besides a model's weights; see models.adapters."""

    def load(self, slot: int, folder: Path) -> str: ...


class AdapterRows:
    """Has each row run with the adapter of its request.

    An adapter that cannot be loaded fails the rows that need it, as `build` raises until a part of the step has none.

    `memory`, `table`: of the steps.

    Attributes:
        adapters: of the model.
    """

    def __init__(self, adapters: AdapterMemory, memory: StepMemory, table: RequestTable) -> None:
        self.adapters, self._memory, self._table = adapters, memory, table
        self._failed: dict[int, Exception] = {}

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        """Put adapters into their places, in which no row of this step or a later one needs another."""
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
        try:
            digest = self.adapters.load(slot, Path(source.folder))
        except CheckpointError as error:
            raise BadRequest(f"model: adapter {shown(source.adapter.name)}: {error.message}", param="model") from None
        if digest != source.adapter.digest:
            text = f"the files of adapter {shown(source.adapter.name)} have changed since it was loaded: load it again"
            raise BadRequest(f"model: {text}", param="model", code="adapter_changed")
