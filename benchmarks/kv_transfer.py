"""`bench kv-transfer`: how fast the KV of a prompt gets from one process to another, by each protocol.

The two instances are processes of this machine, and the pages lie in memory already, so that nothing but the transfer
is measured: from the order to the last page's being written. A plain copy in one process and the same bytes over a
plain TCP connection of loopback are the bounds. All take turns.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.command import Command, show, table_of
from benchmarks.hardware import describe_hardware
from benchmarks.kv_transfer_peer import BLOCK_SIZE, MemoryPages, description, settings
from benchmarks.progress import Progress
from fastdeploy_sd.config.splitwise_section import PROTOCOLS
from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.disaggregation.transfer.events import Fetched
from fastdeploy_sd.errors import ConfigError, FdsdError
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import KvSource, Request

_TIMEOUT_S = 60.0
_SOCKET_BYTES = 1 << 20
COPY, PLAIN_TCP = "copy in memory", "plain TCP"


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What moving the pages cost one way.

    Attributes:
        ms: the median over the rounds, None where the way is not available.
        gb_per_s: 1e9 bytes per second, of the median.
    """

    way: str
    ms: float | None
    gb_per_s: float | None


def main(argv: Sequence[str]) -> int:
    """Measure and print a table."""
    command = Command("kv-transfer", "Measure how KV gets from one instance to another.")
    command.some("--protocols", PROTOCOLS, "(default: all)", PROTOCOLS)
    command.number("--layers", 28, "of the model; the defaults are Qwen3-0.6B's in bfloat16")
    command.number("--page-bytes", 262144, "of a block of 64 tokens in a layer, even", least=2)
    command.number("--blocks", 16, "of the prompt")
    command.number("--rounds", 5)
    command.json()
    args = command.read(argv)
    pages = MemoryPages(args.layers, args.blocks, args.page_bytes, 0)
    seconds = measure(pages, args.protocols, args.rounds)
    costs = [_cost(way, times, pages.memory.nbytes) for way, times in seconds.items()]
    columns: dict[str, str | Callable[[TransferCost], object]] = {
        "way": "{0.way}",
        "ms": "{0.ms:.1f}",
        "GB/s": "{0.gb_per_s:.2f}",
    }
    record = {"hardware": describe_hardware(), "num_bytes": pages.memory.nbytes, "ways": costs}
    show(args, record, f"{pages.memory.nbytes} bytes\n\n{table_of(costs, columns)}")
    return 0


def measure(pages: MemoryPages, protocols: Sequence[str], num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round and way; none where a protocol does not work here.

    Raises:
        FdsdError: a transfer failed.
    """
    key = secrets.token_hex(16)
    with ExitStack() as stack:
        address, port = stack.enter_context(_peer(pages, protocols, key))
        ways: dict[str, Callable[[], None]] = {COPY: _copying(pages), PLAIN_TCP: lambda: _receive_plainly(port, pages)}
        seconds: dict[str, list[float]] = {way: [] for way in (*ways, *protocols)}
        for protocol in protocols:
            try:
                connector = KvConnector(settings("decode", [protocol], key), description(*_shape(pages)), pages)
            except ConfigError:
                continue  # the log says why
            stack.callback(connector.close)
            ways[protocol] = _fetching(connector, address, pages)
        progress = Progress(len(ways) * (num_rounds + 1), "kv-transfer")
        for turn in range(num_rounds + 1):
            for way, run in ways.items():
                pages.memory.fill(0)
                start = time.perf_counter()
                run()
                taken = time.perf_counter() - start
                if not pages.memory.all():
                    raise FdsdError(f"{way}: expected all pages, got others")
                if turn > 0:  # the first one connects, and touches memory for the first time
                    seconds[way].append(taken)
                progress.advance(way)
    return seconds


@contextmanager
def _peer(pages: MemoryPages, protocols: Sequence[str], key: str) -> Iterator[tuple[str, int]]:
    """Run the other process; yield where it takes orders, and its plain TCP port."""
    layers, size = _shape(pages)
    order = {"protocols": protocols, "key": key, "layers": layers, "page_bytes": size, "blocks": pages.memory.shape[1]}
    command = [sys.executable, "-m", "benchmarks.kv_transfer_peer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        try:
            line = process.stdout.readline()
            if not line:
                raise FdsdError("kv-transfer: the other process did not start; its own message is above")
            places: Mapping[str, object] = json.loads(line)
            yield str(places["address"]), int(str(places["port"]))
        finally:
            process.stdin.close()
            process.wait(_TIMEOUT_S)


def _fetching(connector: KvConnector, address: str, pages: MemoryPages) -> Callable[[], None]:
    num_blocks = pages.memory.shape[1]
    request = Request("r", np.zeros(num_blocks * BLOCK_SIZE, np.int32), SamplingParams(), max_tokens=1, seed=0)

    def fetch() -> None:
        connector.fetch(request, KvSource("peer", address), 0, range(num_blocks), _TIMEOUT_S)
        select.select([connector.fd], [], [], _TIMEOUT_S)
        events = connector.take_events()
        if not isinstance(events[0], Fetched):
            raise FdsdError(f"kv-transfer: expected the pages, got {events[0]}")

    return fetch


def _copying(pages: MemoryPages) -> Callable[[], None]:
    source = np.ones_like(pages.memory)
    return lambda: np.copyto(pages.memory, source)


def _receive_plainly(port: int, pages: MemoryPages) -> None:
    target, at = pages.memory.data.cast("B"), 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while at < len(target) and (count := connection.recv_into(target[at : at + _SOCKET_BYTES])):
            at += count


def _shape(pages: MemoryPages) -> tuple[int, int]:
    return pages.num_layers, pages.page_bytes(0)


def _cost(way: str, seconds: Sequence[float], num_bytes: int) -> TransferCost:
    if not seconds:
        return TransferCost(way, None, None)
    return TransferCost(way, median(seconds) * 1e3, num_bytes / median(seconds) / 1e9)
