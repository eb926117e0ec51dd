"""This instance, as both sides of the conversation see it."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.disaggregation.transfer.counters import Counters
from fastdeploy_sd.disaggregation.transfer.events import EventQueue
from fastdeploy_sd.disaggregation.transfer.pages import Pages
from fastdeploy_sd.disaggregation.transfer.settings import ConnectorSettings
from fastdeploy_sd.disaggregation.transports.rdma import RdmaEngine
from fastdeploy_sd.types import KvDescription


@dataclass(frozen=True, slots=True)
class TransferContext:
    """What a connector has one of; `rdma` is None where that protocol is not used."""

    settings: ConnectorSettings
    description: KvDescription
    pages: Pages
    events: EventQueue
    counters: Counters
    rdma: RdmaEngine | None

    @property
    def protocols(self) -> tuple[str, ...]:
        """Those that work here, the preferred first. Where KV is in a GPU's memory, ipc is cuda if it can be."""
        found = tuple(p for p in self.settings.protocols if p != "rdma" or self.rdma is not None)
        return ("cuda", *found) if "ipc" in found and self.pages.port is not None else found
