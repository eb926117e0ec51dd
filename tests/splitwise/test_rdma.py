"""Mooncake's Transfer Engine over loopback, where it is installed: without a device it speaks TCP."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.disaggregation.transfer.events import Fetched
from fastdeploy_sd.disaggregation.transfer.messages import TransferDone
from fastdeploy_sd.disaggregation.transfer.outgoing import Outgoing, Peer
from fastdeploy_sd.disaggregation.transfer.pages import Pages
from fastdeploy_sd.disaggregation.transports.transport import Batch
from fastdeploy_sd.errors import ConfigError
from tests.splitwise.instances import (
    BytePages,
    PrefillEngine,
    connectors,
    describe,
    has_mooncake,
    holds,
    request,
    settings,
    source_of,
)

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not has_mooncake(), reason="needs the extra [rdma] and libibverbs")
def test_pages_arrive() -> None:
    with connectors("rdma") as (decode, ours, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 8)
        orders = {
            decode.fetch(request(n, 6), source_of(prefill.address), 0, range(6 * n, 6 * n + 6), 60): n
            for n in range(20)
        }
        events = engine.serve(decode, len(orders))
        assert {event.transfer_id for event in events if isinstance(event, Fetched)} == set(orders)
        assert all(holds(ours, n, 0, range(6 * n, 6 * n + 6)) for n in range(20))


@pytest.mark.skipif(has_mooncake(), reason="Mooncake is installed")
def test_without_mooncake_another_protocol_is_used_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with connectors("rdma,ipc") as (decode, ours, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 8)
        decode.fetch(request(1, 2), source_of(prefill.address), 0, [0, 1], 60)
        engine.serve(decode)
        assert holds(ours, 1, 0, [0, 1])
    text = "cache_transfer_protocol: left out: rdma: Mooncake's Transfer Engine cannot be loaded"
    assert [line.startswith(text) for line in caplog.messages] == [True, True]
    with pytest.raises(ConfigError, match="cache_transfer_protocol: expected one that works here, got rdma"):
        KvConnector(settings("decode", "rdma"), describe(), BytePages(4))


class LateSender:
    """Places batches when it is told to, several at once."""

    fd: int | None = None

    def __init__(self) -> None:
        self.started: list[Batch] = []

    def start(self, batch: Batch, pages: Pages, block_ids: Sequence[int]) -> None:
        self.started.append(batch)

    def finished(self) -> list[Batch]:
        finished, self.started = self.started, []
        return finished

    def close(self) -> None:
        self.started = []


def test_an_end_waits_for_the_last_of_several_batches_that_are_placed_at_once() -> None:
    peer = Peer(b"p", "d0", 2, 0.0)
    peer.open(LateSender(), "rdma", 8)
    transfer = Outgoing("t", 0, 2, 2, 0.0, 0.0)
    peer.transfers["t"] = transfer
    for layer in (0, 1):
        peer.add_pages(transfer, layer, 0, [0, 1])
    pages = BytePages(2)
    assert [peer.start(pages), peer.start(pages), peer.start(pages)] == [True, True, False]
    transfer.end = TransferDone("t", ())
    assert [transfer.is_over for _ in peer.placed()] == [False, True]
