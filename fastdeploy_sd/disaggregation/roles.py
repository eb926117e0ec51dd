"""An engine in its role among instances: alone, computing prompts for others, or having others compute them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from fastdeploy_sd.config import Config
from fastdeploy_sd.disaggregation.decode_engine import DecodeEngine
from fastdeploy_sd.disaggregation.layer_sender import Signals
from fastdeploy_sd.disaggregation.prefill_engine import PrefillEngine
from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.disaggregation.transfer.pages import Pages
from fastdeploy_sd.disaggregation.transfer.settings import ConnectorSettings
from fastdeploy_sd.engine.engine import Engine
from fastdeploy_sd.engine.interfaces.executor import Executor
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types import KvDescription, ModelInfo


class Identity(Protocol):
    """What KV an executor has; see kv.kv_identity.KvIdentity."""

    def describe(self, page_bytes: tuple[int, ...], windows: tuple[int, ...]) -> KvDescription: ...


@runtime_checkable
class KvOwner(Protocol):
    """An executor whose KV can be read and written; see worker.executor.LocalExecutor."""

    kv_pages: Pages
    kv_identity: Identity
    layer_signals: Signals | None


@contextmanager
def open_engine(config: Config, executor: Executor) -> Iterator[Engine]:
    """Make an engine with what its role needs; ports and threads are given back at the end. ConfigError: the executor's
    KV cannot be exchanged, or the connector cannot be made as configured.
    """
    role = config.splitwise.splitwise_role
    if role == "mixed":
        yield Engine(config, executor)
        return
    if not isinstance(executor, KvOwner):
        raise ConfigError(
            f"splitwise_role: expected mixed, as the KV of this executor is not in one process, got {role}",
            param="splitwise_role",
        )
    pages = executor.kv_pages
    page_bytes = tuple(pages.page_bytes(layer) for layer in range(pages.num_layers))
    description = executor.kv_identity.describe(page_bytes, windows_of(executor.model_info, pages))
    num_draft_layers = pages.num_layers - description.num_layers
    if executor.model_info.num_state_snapshots is not None and num_draft_layers > 1:
        # Their KV goes in whole blocks, so it ends before the prompt's states do.
        raise ConfigError(
            "splitwise_role: expected mixed for a model with recurrent states and a drafter of several layers, got"
            f" {role} and {num_draft_layers} layers",
            param="splitwise_role",
        )
    connector = KvConnector(ConnectorSettings.of(config), description, pages)
    try:
        if role == "prefill":
            engine = PrefillEngine(
                config, executor, connector, pages.groups, description.num_layers, executor.layer_signals
            )
            if config.server.otlp_traces_endpoint is not None:
                from fastdeploy_sd.wire.http.tracing import make_tracer  # other engines do without

                engine.trace = make_tracer(config.server.otlp_traces_endpoint).add_prompt
            try:
                yield engine
            finally:
                engine.close()
        else:
            yield DecodeEngine(config, executor, connector, num_draft_layers)
    finally:
        connector.close()


def windows_of(info: ModelInfo, pages: Pages) -> tuple[int, ...]:
    """Return the windows of a description."""
    of_groups = [*(group.window or 0 for group in info.groups), 0]  # recurrent states have the last one
    windows = tuple(of_groups[group] for group in pages.groups)
    return windows if any(windows) else ()
