"""One engine of a group, through all its starts."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

from fastdeploy_sd.cluster.membership import InstanceLoad
from fastdeploy_sd.engine.ipc.client import EngineClient
from fastdeploy_sd.types import ModelInfo
from fastdeploy_sd.types.stats import EngineState, EngineStats


class GroupedEngine:
    """One engine of a group: its present client, and what is known of it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client: EngineClient | None = None
        self._model_info: ModelInfo | None = None
        self.is_known = asyncio.Event()
        self.is_paused = False  # the last one was, when it ended
        self._left_at = -math.inf
        self._counted: EngineStats | None = None
        self._num_of_others = 0

    @property
    def model_info(self) -> ModelInfo | None:
        """What it has loaded, the last time where it is down; None = nothing yet."""
        if self.client is not None:
            self._model_info = self.client.model_info
        return self._model_info

    def enter(self, client: EngineClient) -> None:
        """It has been started (again)."""
        self.client = client
        self.is_known.set()

    def leave(self) -> None:
        """It has ended."""
        self._model_info, self.client, self._left_at = self.model_info, None, time.monotonic()

    @property
    def lost_at(self) -> float:
        """When it was lost the last time, on time.monotonic's clock: now, while it is about to end."""
        is_leaving = self.client is not None and self.client.state.name in ("down", "draining")
        return time.monotonic() if is_leaving else self._left_at

    def has_adapter(self, digest: str) -> bool:
        """Whether it has the adapter with a digest, "" = none."""
        info = self.model_info
        return not digest or (info is not None and any(source.adapter.digest == digest for source in info.adapters))

    @property
    def state(self) -> EngineState:
        return EngineState("down") if self.client is None else self.client.state

    @property
    def said_load(self) -> InstanceLoad:
        return InstanceLoad(takes_requests=False) if self.client is None else InstanceLoad.of(self.client)

    @property
    def load(self) -> InstanceLoad:
        """Its load with the requests of this process as of now, and those of others as of its last statistics."""
        load = self.said_load
        if self.client is None or load.takes_requests is False:
            return load
        stats, num_own = self.client.last_stats, self.client.num_requests
        if stats is not self._counted:
            self._counted = stats
            self._num_of_others = max(0, load.num_running + load.num_waiting - num_own)
        return replace(load, num_running=num_own + self._num_of_others, num_waiting=0)
