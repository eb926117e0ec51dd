"""Pages go from one connector to another over real sockets, and nothing else reaches a page."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.disaggregation.transfer.counters import Failure
from fastdeploy_sd.disaggregation.transfer.events import Fetched, FetchFailed, PrefillWanted, Sent
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.types.stats import WayStats
from tests.splitwise.instances import (
    BLOCK_SIZE,
    DEADLINE_S,
    LAYERS,
    PROTOCOLS,
    BytePages,
    PrefillEngine,
    connectors,
    describe,
    holds,
    next_events,
    request,
    settings,
    source_of,
)

pytestmark = pytest.mark.slow

WAYS = {protocol: WayStats() for protocol in ("ipc", "tcp", "rdma", "cuda")}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_pages_and_drafts_arrive(protocol: str) -> None:
    with connectors(protocol) as (decode, ours, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 8)
        blocks = [20, 3, 11, 7]
        transfer_id = decode.fetch(request(5, 6), source_of(prefill.address), 2, blocks, 60)
        assert engine.serve(decode, 1) == [Fetched(transfer_id, (6, 7))]
        assert holds(ours, 5, 2, blocks)
        assert all(ours.is_canary(b) for b in range(256) if b not in blocks)
        engine.finish()
        received, sent = decode.stats(), prefill.stats()
        assert (received.sent, sent.received) == (WAYS, WAYS)
        for ways in (received.received, sent.sent):
            way = ways[protocol]
            assert (way.num_pages, way.num_bytes, way.num_transfers) == (4 * len(LAYERS), 4 * sum(LAYERS), 1)
            assert way.seconds > 0
            assert ways == {**WAYS, protocol: way}
        assert {*received.num_refused.values(), *sent.num_refused.values(), sent.num_unsent} == {0}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_transfers_share_a_small_window(protocol: str) -> None:
    """8192 bytes hold ten pages; each transfer has eighteen, and all are under way at once."""
    with connectors(protocol) as (decode, ours, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 8)
        orders = {
            decode.fetch(request(n, 6), source_of(prefill.address), 0, range(6 * n, 6 * n + 6), 60): n
            for n in range(30)
        }
        events = engine.serve(decode, 30)
        assert sorted(orders[e.transfer_id] for e in events if isinstance(e, Fetched)) == list(range(30))
        assert all(holds(ours, n, 0, range(6 * n, 6 * n + 6)) for n in range(30))


def test_the_window_is_for_pages_that_grow_as_the_prompt_is_computed() -> None:
    """Layer by layer and chunk by chunk, in any order; what was not ordered is left out."""
    with connectors("ipc") as (decode, ours, prefill, theirs):
        transfer_id = decode.fetch(request(1, 4), source_of(prefill.address), 1, [0, 1, 2], 60)
        (wanted,) = next_events(prefill)
        assert isinstance(wanted, PrefillWanted)
        assert (wanted.first_block, wanted.num_blocks, wanted.request.kv_source) == (1, 3, None)
        assert np.array_equal(wanted.request.prompt_token_ids, np.full(4 * BLOCK_SIZE, 1))
        for layer in theirs.memory:
            layer[:] = np.arange(len(layer))[:, None]
        for layer in (2, 0, 1):
            prefill.send(transfer_id, layer, 3, [13, 14])  # block 4 does not exist
        assert decode.take_events() == []
        for layer in (0, 1, 2, 3):  # there is no layer 3
            prefill.send(transfer_id, layer, 0, [10, 11, 12])
        prefill.finish(transfer_id, ())
        assert next_events(decode) == [Fetched(transfer_id, ())]
        assert [int(ours.memory[2][b, 0]) for b in (0, 1, 2)] == [11, 12, 13]
        assert next_events(prefill) == [Sent(transfer_id)]


def test_a_prefill_instance_may_have_more_draft_layers() -> None:
    theirs, ours = BytePages(16), BytePages(16, LAYERS[:2])
    prefill = KvConnector(settings("prefill"), describe(), theirs)
    decode = KvConnector(settings("decode"), describe(LAYERS[:2], 0), ours)
    try:
        engine = PrefillEngine(prefill, theirs, 8)
        decode.fetch(request(5, 2), source_of(prefill.address), 0, [1, 2], 60)
        assert isinstance(engine.serve(decode, 1)[0], Fetched)
        assert holds(ours, 5, 0, [1, 2])
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        ({"model_fingerprint": "other"}, "model_fingerprint: expected other as on the decode instance, got demo on"),
        ({"block_size": 8}, "block_size: expected 8 as on the decode instance, got 4 on the prefill instance"),
        (
            {"device": "CUDA, GPU"},
            "device: expected CUDA, GPU as on the decode instance, got CPU on the prefill instance",
        ),
        ({"kv_format": "int8"}, "kv_format: expected int8 as on the decode instance, got bfloat16"),
        ({"num_kv_heads": 4}, "num_kv_heads: expected 4 as on the decode instance, got 2"),
        ({"head_dim": 8}, "head_dim: expected 8 as on the decode instance, got 16"),
        ({"num_layers": 1}, "num_layers: expected 1 as on the decode instance, got 2"),
        ({"page_bytes": (*LAYERS, 768)}, "draft layers: expected at least 2 as on the decode instance, got 1"),
        ({"draft_fingerprint": "x"}, "draft_fingerprint: expected x as on the decode instance, got mtp"),
        ({"page_bytes": (512, 256, 768)}, "page_bytes of layer 1: expected 256 as on the decode instance, got 512"),
    ],
)
def test_instances_that_differ_refuse_each_other(
    ours: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time they are asked; the log has it once."""
    prefill = KvConnector(settings("prefill"), describe(), BytePages(4))
    asking = settings("decode", retry_s=0.0)
    decode = KvConnector(asking, describe(**ours), BytePages(4))
    try:
        reasons = set()
        for _ in range(3):
            decode.fetch(request(1, 1), source_of(prefill.address), 0, [0], 60)
            (event,) = next_events(decode)
            assert isinstance(event, FetchFailed)
            assert event.failure is Failure.REFUSED
            reasons.add(event.reason)
        [reason] = reasons
        assert reason.startswith(text)
        assert prefill.take_events() == []
    finally:
        decode.close()
        prefill.close()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(warnings) == [
        f"decode instance {asking.instance_id} is refused: {reason}",
        f"prefill instance {prefill.address} is lost: {reason}",
    ]


@pytest.mark.parametrize("wrong", ["server_key", "client_key"])
def test_another_secret_gets_nothing(wrong: str) -> None:
    prefill = KvConnector(settings("prefill"), describe(), BytePages(4))
    changes: dict[str, Any] = {wrong: b"x" * 32}
    decode = KvConnector(settings("decode", **changes), describe(), BytePages(4))
    try:
        decode.fetch(request(1, 1), source_of(prefill.address), 0, [0], 60)
        (event,) = next_events(decode)
        assert isinstance(event, FetchFailed)
        assert event.failure is Failure.UNREACHABLE
        assert prefill.take_events() == []
    finally:
        decode.close()
        prefill.close()


def test_no_protocol_in_common_is_an_error() -> None:
    prefill = KvConnector(settings("prefill", "tcp"), describe(), BytePages(4))
    decode = KvConnector(settings("decode", "ipc"), describe(), BytePages(4))
    try:
        decode.fetch(request(1, 1), source_of(prefill.address), 0, [0], 60)
        (event,) = next_events(decode)
        assert isinstance(event, FetchFailed)
        assert event.reason == "cache_transfer_protocol: no way in common: expected one of ipc, got tcp"
    finally:
        decode.close()
        prefill.close()


def test_addresses_that_others_reach_need_a_secret() -> None:
    with pytest.raises(ConfigError, match=r"pd_secret: expected one for address 0\.0\.0\.0"):
        KvConnector(dataclasses.replace(settings("prefill", is_local=True), host="0.0.0.0"), describe(), BytePages(4))
    decode = KvConnector(settings("decode", is_local=True), describe(), BytePages(4))
    try:
        decode.fetch(request(1, 1), source_of("tcp://192.0.2.1:5"), 0, [0], 60)
        (event,) = next_events(decode)
        assert isinstance(event, FetchFailed)
        assert event.reason.startswith("pd_secret: expected one for tcp://192.0.2.1:5")
    finally:
        decode.close()


def test_a_port_that_is_taken_is_an_error() -> None:
    prefill = KvConnector(settings("prefill"), describe(), BytePages(4))
    try:
        port = int(prefill.address.rpartition(":")[2])
        assert prefill.address == f"tcp://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"pd_comm_port: expected a free port of 127.0.0.1, got {port}"):
            KvConnector(settings("prefill", port=port), describe(), BytePages(4))
    finally:
        prefill.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_left_behind(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def run() -> None:
        with connectors(protocol) as (decode, _, prefill, theirs):
            engine = PrefillEngine(prefill, theirs, 8)
            decode.fetch(request(5, 6), source_of(prefill.address), 0, range(6), 60)
            engine.serve(decode, 1)
            decode.fetch(request(5, 6), source_of(prefill.address), 0, range(6), 60)  # never answered

    run()
    gc.collect()  # of other tests
    before, threads = open_files(), threading.active_count()
    for _ in range(5):
        run()
    # What other tests left may end meanwhile.
    assert open_files() <= before
    assert threading.active_count() <= threads
    lines = [line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
    ours = {Path(f"/proc/self/fd/{fd}").resolve().name for fd in os.listdir("/proc/self/fd")}
    assert not [line for line in lines if line[-1].startswith("@fdsd-") and f"socket:[{line[6]}]" in ours]
    assert not caplog.records


def test_the_engine_does_not_wait_while_a_write_waits_for_a_device() -> None:
    with connectors() as (decode, ours, prefill, theirs):
        engine = PrefillEngine(prefill, theirs, 8)
        is_waiting, is_over = threading.Event(), threading.Event()

        def wait() -> None:
            is_waiting.set()
            assert is_over.wait(DEADLINE_S)

        ours.awaited = lambda _layer: None if is_over.is_set() else wait
        first = decode.fetch(request(5, 2), source_of(prefill.address), 0, [1, 2], DEADLINE_S)
        engine.serve_until(is_waiting.is_set, "a page")
        decode.cancel(first)
        second = decode.fetch(request(6, 2), source_of(prefill.address), 0, [3, 4], DEADLINE_S)
        assert decode.take_events() == []
        is_over.set()
        assert engine.serve(decode, 1) == [Fetched(second, (7, 8))]
        assert ours.is_canary(1)
        assert ours.is_canary(2)
        engine.finish()
