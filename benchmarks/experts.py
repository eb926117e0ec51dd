"""`bench experts`: what giving rows to the experts of other ranks costs, without the experts.

Ranks are threads of this process with one kernel thread each. Their experts are as small as they can be, and the time
of `moe_ffn` with the same experts in one process is subtracted. A copy of as many bytes is measured besides. Several
hosts are addresses of this one; real processes carry rows between them, over encrypted sockets.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from benchmarks.command import Command, Progress, show, table_of
from benchmarks.hardware import describe_hardware
from fastdeploy_sd.config import config_from_kwargs
from fastdeploy_sd.device import library
from fastdeploy_sd.device.expert_service import ExpertService, ServiceShape, expert_segment
from fastdeploy_sd.device.expert_types import ExpertLayer, ExpertSlot
from fastdeploy_sd.device.library import BoundCall
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.distributed.expert_process import start_bridge
from fastdeploy_sd.errors import ConfigError
from fastdeploy_sd.ops.experts import COMBINE_EXPERTS, DISPATCH_EXPERTS
from fastdeploy_sd.ops.linear_format import LinearFormat, format_code
from fastdeploy_sd.ops.moe import MOE_FFN
from fastdeploy_sd.ops.packing import packed_bytes

# As many experts as a token chooses: all of a rank's are used at any number of rows.
NUM_EXPERTS = TOP_K = 8
INNER = 1
ROWS = (1, 8, 64, 512)
_FORMAT: LinearFormat = "bfloat16"
_CALLS = 40
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """One layer of one rank, in microseconds; medians over the rounds.

    Attributes:
        num_hosts: over which the ranks are.
        alone_us: only this rank has tokens.
        together_us: all ranks have as many, and begin at the same time.
        copy_us: a copy of the rows and of the experts' results.
    """

    num_hosts: int
    num_ranks: int
    num_rows: int
    alone_us: float
    together_us: float
    copy_us: float


def main(argv: Sequence[str]) -> int:
    """Measure and print a table."""
    command = Command("experts", "Measure what giving rows to the experts of other ranks costs.")
    command.number("--ranks", (2, 4))
    command.number("--hosts", (1,), "loopback addresses over which the ranks are, as many on each")
    command.number("--rows", ROWS)
    command.number("--hidden", 2048, "elements of a row, in bfloat16")
    command.number("--rounds", 5)
    command.json()
    args = command.read(argv)
    for num_hosts, num_ranks in product(args.hosts, args.ranks):
        if num_ranks % num_hosts:
            raise ConfigError(f"hosts: expected a divisor of {num_ranks} (ranks), got {num_hosts}", param="hosts")
    progress = Progress(len(args.ranks) * len(args.hosts), "experts")
    costs = []
    before = library.num_threads()
    library.set_num_threads(1)
    try:
        for num_hosts, num_ranks in product(args.hosts, args.ranks):
            costs += measure_exchange(num_hosts, num_ranks, args.rows, args.hidden, args.rounds)
            progress.advance(f"{num_ranks} ranks, hosts: {num_hosts}")
    finally:
        library.set_num_threads(before)
    show(args, {"hardware": describe_hardware(), "experts": costs}, exchange_table(costs))
    return 0


def exchange_table(costs: Sequence[ExchangeCost]) -> str:
    """Return a Markdown table."""
    columns = {
        "hosts": "{0.num_hosts}",
        "ranks": "{0.num_ranks}",
        "rows": "{0.num_rows}",
        "one rank has rows, us": "{0.alone_us:.1f}",
        "all ranks, us": "{0.together_us:.1f}",
        "copy, us": "{0.copy_us:.1f}",
    }
    return table_of(costs, columns)


def measure_exchange(
    num_hosts: int, num_ranks: int, rows: Sequence[int], hidden: int, num_rounds: int
) -> list[ExchangeCost]:
    """Measure several numbers of rows."""
    weights = _Weights(hidden)
    with _serving(weights, num_hosts, num_ranks, max(rows)) as services:
        return [_measured(weights, services, num_hosts, num_rows, num_rounds) for num_rows in rows]


@contextlib.contextmanager
def _serving(weights: _Weights, num_hosts: int, num_ranks: int, max_tokens: int) -> Iterator[list[ExpertService]]:
    """Yield all ranks, which serve one another."""
    services: list[ExpertService] = []
    with contextlib.ExitStack() as stack:
        files = [expert_segment() for _ in range(num_hosts)]
        for file in files:
            stack.callback(os.close, file)
        try:
            per_host = num_ranks // num_hosts
            services += [weights.serve(files[r // per_host], r, num_ranks, max_tokens) for r in range(num_ranks)]
            with _bridges(files, num_ranks):
                for service in services:
                    service.wait_until_all_serve(_START_S)
                yield services
        finally:
            for service in services:
                service.abort()
            for service in services:
                service.close()


@contextlib.contextmanager
def _bridges(files: Sequence[int], num_ranks: int) -> Iterator[None]:
    """Meanwhile the ranks of several hosts, which have a file each, hear of one another."""
    if len(files) == 1:
        yield
        return
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free_port = taken.getsockname()[1]
    ips, secret = [f"127.0.0.{number + 1}" for number in range(len(files))], secrets.token_hex()
    with contextlib.ExitStack() as stack:
        for number, file in enumerate(files):
            config = config_from_kwargs(
                model="demo", enable_expert_parallel=True, data_parallel_size=num_ranks,
                ips=ips, node_rank=number, node_port=free_port, pd_secret=secret,
            )  # fmt: skip
            stack.enter_context(contextlib.closing(start_bridge(config, file)))
        yield


def _measured(
    weights: _Weights, services: Sequence[ExpertService], num_hosts: int, num_rows: int, num_rounds: int
) -> ExchangeCost:
    layers = [weights.calls(service, num_rows) for service in services]
    local = weights.local_calls(num_rows)
    sizes = num_rows * weights.hidden * 2, num_rows * TOP_K * weights.hidden * 4
    copies = [np.ones((2, size), np.uint8) for size in sizes]

    def copy() -> None:
        for source, target in copies:
            np.copyto(target, source)

    found: list[list[float]] = [[], [], [], []]
    for _ in range(num_rounds):
        found[0].append(_us_of(lambda: _run(local)))
        found[1].append(_us_of(lambda: _run(layers[0])))
        found[2].append(_us_of_threads([lambda own=own: _run(own) for own in layers]))
        found[3].append(_us_of(copy))
    without, alone, together, copied = map(median, found)
    return ExchangeCost(num_hosts, len(services), num_rows, alone - without, together - without, copied)


def _run(calls: Sequence[BoundCall]) -> None:
    for call in calls:
        call.run()


def _us_of(body: Any) -> float:
    body()
    begin = time.perf_counter()
    for _ in range(_CALLS):
        body()
    return (time.perf_counter() - begin) / _CALLS * 1e6


def _us_of_threads(bodies: Sequence[Any]) -> float:
    """Of the slowest of those that run at once."""
    start = threading.Barrier(len(bodies))
    times: list[float] = []

    def work(body: Any) -> None:
        start.wait()
        times.append(_us_of(body))

    workers = [threading.Thread(target=work, args=(body,)) for body in bodies]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(times)


class _Weights:
    """Experts of zeros, and calls of the ops with them."""

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden
        self._gate_up_bytes = packed_bytes(hidden, 2 * INNER, _FORMAT)
        self._down_bytes = packed_bytes(INNER, hidden, _FORMAT)
        self._gate_up = WeightMemory().take(NUM_EXPERTS * self._gate_up_bytes)
        self._down = WeightMemory().take(NUM_EXPERTS * self._down_bytes)
        self._router = np.random.default_rng(0).standard_normal((NUM_EXPERTS, hidden), np.float32)

    def serve(self, fd: int, rank: int, num_ranks: int, max_tokens: int) -> ExpertService:
        """Return a rank with its range of the experts."""
        own = range(NUM_EXPERTS * rank // num_ranks, NUM_EXPERTS * (rank + 1) // num_ranks)
        num_slots = -(-NUM_EXPERTS // num_ranks)
        shape = ServiceShape(
            num_ranks, 1, NUM_EXPERTS, num_slots, TOP_K, self.hidden, 2 * self.hidden, max_tokens
        )  # fmt: skip
        service = ExpertService.open(fd, rank, shape)
        code = format_code(_FORMAT)
        layer = ExpertLayer(NUM_EXPERTS, self.hidden, INNER, TOP_K, np.uint16, code, code)
        gate_up, down = self._gate_up.ctypes.data, self._down.ctypes.data
        slots = [ExpertSlot(e, gate_up + e * self._gate_up_bytes, down + e * self._down_bytes) for e in own]
        service.register_layer(0, layer, [*slots, *[None] * (num_slots - len(slots))])
        service.start()
        return service

    def _arrays(self, num_rows: int) -> dict[str, Any]:
        x: np.ndarray = np.zeros((num_rows, self.hidden), np.uint16)
        return {"x": x, "y": np.empty_like(x)}

    def _routing(self) -> dict[str, Any]:
        routing = {"router_weight": self._router, "router_bias": None, "selection_bias": None, "sigmoid": False}
        numbers = {"num_groups": 1, "num_chosen_groups": 1, "top_k": TOP_K, "normalize": True, "norm_min": 0.0}
        return routing | numbers | {"scale": 1.0}

    def local_calls(self, num_rows: int) -> list[BoundCall]:
        """moe_ffn, the routing included."""
        code = format_code(_FORMAT)
        sizes = {"hidden_size": self.hidden, "intermediate_size": INNER, "first_expert": 0}
        formats = {"gate_up_format": code, "down_format": code, "gate_limit": 0.0, "num_slices": 1}
        none = {"gate_up_bias": None, "down_bias": None, "shared": None}
        call = MOE_FFN.bind(
            **self._arrays(num_rows),
            **self._routing(),
            **sizes,
            **formats,
            **none,
            num_local_experts=NUM_EXPERTS,
            gate_up=self._gate_up,
            down=self._down,
            y_dtype="bfloat16",
        )
        return [call]

    def calls(self, service: ExpertService, num_rows: int) -> list[BoundCall]:
        """Both ops of a layer, without the marks of a pass: ranks do not wait for one another's passes."""
        arrays = self._arrays(num_rows)
        choice = {
            "expert_ids": np.empty((num_rows, TOP_K), np.int32),
            "weights": np.empty((num_rows, TOP_K), np.float32),
        }
        common = {"service": service.handle, "layer": 0, "part": 0, "num_parts": 1, "x": arrays["x"], **choice}
        ends = {"y": arrays["y"], "y_dtype": "bfloat16", "shared": None, "num_slices": 1, "is_last": False}
        return [
            DISPATCH_EXPERTS.bind(**common, **self._routing(), is_first=False),
            COMBINE_EXPERTS.bind(**common, **ends),
        ]
