"""DecodeEngine: an engine whose prompts get their KV from the prefill instances that their requests name."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fastdeploy_sd.config import Config
from fastdeploy_sd.disaggregation.decode_connector import DecodeConnector, Fetcher
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.executor import Executor
from fastdeploy_sd.types import KvDescription, ModelInfo
from fastdeploy_sd.types.stats import EngineStats, TransferStats


class Receiver(Fetcher, Protocol):
    """The part of a KvConnector that a decode instance uses; see there."""

    description: KvDescription

    def stats(self) -> TransferStats: ...


class DecodeEngine(Engine):
    """See the module.

    Args:
        connector: the caller's to close, after this engine.
        num_draft_layers: whose KV comes too.
    """

    def __init__(self, config: Config, executor: Executor, connector: Receiver, num_draft_layers: int) -> None:
        self._connector = connector
        timeout_s = config.splitwise.pd_timeout_s
        super().__init__(config, executor, DecodeConnector(connector, executor.model_info, num_draft_layers, timeout_s))

    @property
    def model_info(self) -> ModelInfo:
        """What the executor has loaded, and which KV it takes."""
        return replace(super().model_info, kv=self._connector.description)

    def stats(self) -> EngineStats:
        """As Engine.stats, with what came from other instances."""
        return replace(super().stats(), transfers=self._connector.stats())
