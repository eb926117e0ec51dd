"""Connectors over byte arrays: what a page holds follows from the prompt, so that any wrong byte is seen."""

from __future__ import annotations

import dataclasses
import importlib
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.disaggregation.transfer.events import Event, PrefillCancelled, PrefillWanted, Sent
from fastdeploy_sd.disaggregation.transfer.pages import Bytes, DevicePort
from fastdeploy_sd.disaggregation.transfer.settings import ConnectorSettings
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import KvDescription, KvSource, Request
from fastdeploy_sd.types.stats import WayStats

BLOCK_SIZE = 4
LAYERS = (512, 512, 768)  # two of the target and a draft layer
CANARY = 0xA5
DEADLINE_S = 120.0
SECRET = b"k" * 31
PROTOCOLS = ("ipc", "tcp")
Behaviour = Literal["all", "half", "nothing"]


def total(ways: Mapping[str, WayStats]) -> WayStats:
    """What went in one direction, by any protocol."""
    each = ways.values()
    return WayStats(*(sum(getattr(way, f.name) for way in each) for f in dataclasses.fields(WayStats)))


class BytePages:
    """Pages in memory, in two pieces each; a decode instance's begin as canaries."""

    def __init__(self, num_blocks: int, layers: Sequence[int] = LAYERS) -> None:
        self.num_layers = len(layers)
        self.groups: Sequence[int] = [0] * len(layers)
        self.memory = [np.full((num_blocks, size), CANARY, np.uint8) for size in layers]
        self.delay_s = 0.0
        self.port: DevicePort | None = None

    def page_bytes(self, layer: int) -> int:
        return int(self.memory[layer].shape[1])

    def read_all(self, layer: int, block_ids: Sequence[int]) -> Sequence[tuple[Bytes, ...]]:
        pages = [self.memory[layer][block_id] for block_id in block_ids]
        return [(page[:200], page[200:]) for page in pages]

    def awaited(self, _layer: int) -> None:
        """Writing waits for nothing."""

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        self.memory[layer][block_id] = np.frombuffer(data, np.uint8)

    def follow_steps(self) -> None:
        """There are no steps."""

    def end_writes(self) -> None:
        """All is in its place."""

    def is_canary(self, block_id: int) -> bool:
        return all(bool((layer[block_id] == CANARY).all()) for layer in self.memory)


def content(prompt: int, layer: int, block: int, num_bytes: int) -> Bytes:
    """What block `block` of the prompt that starts with this token holds in a layer."""
    return np.random.default_rng((prompt, layer, block)).integers(0, 256, num_bytes, np.uint8)


def holds(pages: BytePages, prompt: int, first_block: int, block_ids: Sequence[int]) -> bool:
    """Whether these blocks hold the prompt's pages from `first_block` on."""
    return all(
        np.array_equal(pages.memory[layer][block_id], content(prompt, layer, block, pages.page_bytes(layer)))
        for layer in range(pages.num_layers)
        for block, block_id in enumerate(block_ids, first_block)
    )


def describe(layers: Sequence[int] = LAYERS, num_draft: int = 1, **changes: Any) -> KvDescription:
    description = KvDescription(
        device="CPU",
        model_fingerprint="demo",
        block_size=BLOCK_SIZE,
        kv_format="bfloat16",
        num_layers=len(layers) - num_draft,
        num_kv_heads=2,
        head_dim=16,
        page_bytes=tuple(layers),
        draft_fingerprint="mtp" if num_draft else "",
    )
    return dataclasses.replace(description, **changes)


def settings(role: str, protocol: str = "tcp", **changes: Any) -> ConnectorSettings:
    values = ConnectorSettings(
        role=role,
        host="127.0.0.1",
        port=0,
        protocols=tuple(protocol.split(",")),
        server_key=SECRET + b"s",
        client_key=SECRET + b"c",
        window_bytes=8192,
    )
    return dataclasses.replace(values, **changes)


def has_mooncake() -> bool:
    """Whether rdma can be tested: its extra is installed, and the system's libibverbs."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError:
        return False
    return True


def request(prompt: int, num_blocks: int) -> Request:
    ids = np.full(num_blocks * BLOCK_SIZE, prompt, np.int32)
    return Request(f"r{prompt}", ids, SamplingParams(), max_tokens=8, seed=1)


def source_of(address: str) -> KvSource:
    return KvSource("p0", address)


def wait_for(what: Callable[[], Any], why: str) -> Any:
    """Return what `what` returns as soon as that is true."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited for {why}")


def next_events(connector: KvConnector, count: int = 1) -> list[Event]:
    """Return the next events, at least `count`."""
    events: list[Event] = []
    end = time.monotonic() + DEADLINE_S
    while len(events) < count:
        assert time.monotonic() < end, f"expected {count} events, got {events}"
        select.select([connector.fd], [], [], 1.0)
        events += connector.take_events()
    return events


class PrefillEngine:
    """Answers orders as an engine would: each prompt has blocks of its own, sent layer by layer. Used by one thread.

    "half" sends one layer and "nothing" none; both leave the order at that.
    """

    def __init__(
        self, connector: KvConnector, pages: BytePages, blocks_per_prompt: int, behaviour: Behaviour = "all"
    ) -> None:
        self.connector, self._pages, self.behaviour = connector, pages, behaviour
        self.free = list(range(0, len(pages.memory[0]), blocks_per_prompt))
        self.running: dict[str, int] = {}
        self.cancelled: list[str] = []
        self.num_orders = 0

    def step(self) -> None:
        """Handle what has arrived."""
        for event in self.connector.take_events():
            if isinstance(event, PrefillWanted):
                self.num_orders += 1
                self._compute(event)
            elif isinstance(event, PrefillCancelled):
                self.cancelled.append(event.transfer_id)
            elif isinstance(event, Sent):
                start = self.running.pop(event.transfer_id)
                self.free += [start] if start >= 0 else []

    def serve_until(self, what: Callable[[], Any], why: str) -> Any:
        """Work until `what` returns something true, and return that."""

        def look() -> Any:
            self.step()
            return what()

        return wait_for(look, why)

    def serve(self, connector: KvConnector, count: int = 1) -> list[Event]:
        """Work until a decode instance has so many events, and return them."""
        events: list[Event] = []

        def has_all() -> bool:
            events.extend(connector.take_events())
            return len(events) >= count

        self.serve_until(has_all, f"{count} events")
        return events

    def finish(self) -> None:
        """Work until every transfer has ended."""
        self.serve_until(lambda: not self.running, "the end of all transfers")

    def _compute(self, order: PrefillWanted) -> None:
        if not self.free:
            self.running[order.transfer_id] = -1
            self.connector.fail(order.transfer_id, "no blocks")
            return
        start = self.free.pop()
        self.running[order.transfer_id] = start
        prompt, end = int(order.request.prompt_token_ids[0]), order.first_block + order.num_blocks
        num_layers = {"all": self._pages.num_layers, "half": 1, "nothing": 0}[self.behaviour]
        for layer in range(num_layers):
            for block in range(end):
                page = content(prompt, layer, block, self._pages.page_bytes(layer))
                self._pages.memory[layer][start + block] = page
            self.connector.send(order.transfer_id, layer, 0, range(start, start + end))
        if self.behaviour == "all":
            self.connector.finish(order.transfer_id, (prompt + 1, prompt + 2))


@contextmanager
def connectors(protocol: str = "tcp", num_blocks: int = 256, **changes: Any) -> Iterator[tuple[Any, ...]]:
    """Yield (decode connector, its pages, prefill connector, its pages); `changes` are of the settings of both."""
    ours, theirs = BytePages(num_blocks), BytePages(num_blocks)
    prefill = KvConnector(settings("prefill", protocol, **changes), describe(), theirs)
    try:
        decode = KvConnector(settings("decode", protocol, **changes), describe(), ours)
        try:
            yield decode, ours, prefill, theirs
        finally:
            decode.close()
    finally:
        prefill.close()
