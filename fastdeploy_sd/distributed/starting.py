"""Starts the processes of a node's ranks, and opens what they exchange bytes with. Values travel by standard input."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps, loads

from fastdeploy_sd.config import Config, ParallelConfig, to_json
from fastdeploy_sd.device import library
from fastdeploy_sd.device.communicator import Communicator, shared_segment
from fastdeploy_sd.device.expert_service import expert_segment
from fastdeploy_sd.device.processors import own_processors
from fastdeploy_sd.distributed.exchange import OtherExchange
from fastdeploy_sd.distributed.link import RankLink, Relay
from fastdeploy_sd.distributed.watch import COMPUTING_TIMEOUTS
from fastdeploy_sd.models.weights.shared_weights import create_weights_file
from fastdeploy_sd.process.child import ChildProcess
from fastdeploy_sd.types.shard import Shard
from fastdeploy_sd.wire.sockets import CurveKeys
from fastdeploy_sd.worker.ranks.rank_group import ExpertPlace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExchangeStart:
    """The values with which the first rank of another node connects; see exchange.OtherExchange. keys: four texts."""

    address: str
    group: str
    node: int
    keys: tuple[str, ...]

    @staticmethod
    def of(keys: CurveKeys, address: str, group: str, node: int) -> ExchangeStart:
        """Return the values for a socket with these keys."""
        texts = (keys.server_public, keys.server_secret, keys.client_public, keys.client_secret)
        return ExchangeStart(address, group, node, tuple(text.decode() for text in texts))

    def open(self, timeout_s: float) -> OtherExchange:
        """Return an unconnected end."""
        keys = CurveKeys(*(text.encode() for text in self.keys))
        return OtherExchange(keys, self.address, self.group, self.node, timeout_s)


class RankStarter:
    """Starts processes of the ranks of this node, until `close`; `exchange` is for the first rank of a later node.

    `expert_file`: see ExpertPlace; None = experts are not spread.
    """

    def __init__(
        self,
        config: Config,
        rank_worker: str,
        exchange: ExchangeStart | None = None,
        expert_file: int | None = None,
    ) -> None:
        parallel = config.parallel
        self._config, self._rank_worker, self._exchange = config, rank_worker, exchange
        self._expert_file = expert_file
        self._size, self._per_node = parallel.tensor_parallel_size, parallel.ranks_per_node
        self._timeout_s = exchange_timeout_s(parallel)
        self._segment = shared_segment() if self._per_node > 1 else None

    def close(self) -> None:
        """Free the descriptors; started processes continue."""
        if self._segment is not None:
            os.close(self._segment)

    def local_communicator(self, rank: int) -> Communicator | None:
        """Return a rank's end of the communicator of this node's ranks; None = it is the only one."""
        if self._segment is None:
            return None
        return Communicator.shared(self._segment, rank % self._per_node, self._per_node, self._timeout_s)

    def start_linked(self, rank: int, kv_file: int | None = None) -> tuple[ChildProcess, RankLink]:
        """Start a rank that is linked with this process; kv_file: see RankGroup.kv_files."""
        link, theirs = RankLink.pair()
        with theirs:
            return self._start(rank, theirs, kv_file), link

    def start_relayed(self, rank: int) -> tuple[ChildProcess, Relay]:
        """Start a rank whose link's bytes this process carries on."""
        relay, theirs = Relay.pair()
        with theirs:
            return self._start(rank, theirs, None), relay

    def _start(self, rank: int, theirs: socket.socket, kv_file: int | None) -> ChildProcess:
        fds = [theirs.fileno()]
        start = {
            "config": to_json(self._config),
            "rank_worker": self._rank_worker,
            "rank": str(rank),
            "size": str(self._size),
            "per_node": str(self._per_node),
            "num_threads": str(threads_per_rank(self._per_node)),
            "timeout_s": str(self._timeout_s),
            "isa": library.isa(),
            "link": str(theirs.fileno()),
        }
        if self._segment is not None:
            start["segment"] = str(self._segment)
            fds.append(self._segment)
        if kv_file is not None:
            start["kv_file"] = str(kv_file)
            fds.append(kv_file)
        if self._expert_file is not None:
            start["expert_file"] = str(self._expert_file)
            fds.append(self._expert_file)
        if self._exchange is not None and rank % self._per_node == 0:
            e = self._exchange
            start["exchange"] = dumps([e.address, e.group, e.node, e.keys])
        return ChildProcess("fastdeploy_sd.distributed.process:main", start, tuple(fds), ignores_signals=True)


def open_communicator(start: Mapping[str, str]) -> tuple[Communicator, OtherExchange | None]:
    """Return the communicator of a process that a RankStarter has started, and the exchange that must be connected."""
    rank, size, per_node = int(start["rank"]), int(start["size"]), int(start["per_node"])
    timeout_s = float(start["timeout_s"])
    local = None
    if "segment" in start:
        local = Communicator.shared(int(start["segment"]), rank % per_node, per_node, timeout_s)
        os.close(int(start["segment"]))
    if local is not None and per_node == size:
        return local, None
    exchange = None
    if "exchange" in start:
        address, group, node, keys = loads(start["exchange"])
        exchange = ExchangeStart(address, group, node, tuple(keys)).open(timeout_s)
    return Communicator.over(exchange, rank, size, log_exchange_error, local), exchange


@contextmanager
def new_expert_file(parallel: ParallelConfig) -> Iterator[int | None]:
    """Yield the descriptor of memory over which ranks share experts, None = they do not."""
    if parallel.expert_ranks == 1:
        yield None
        return
    file = expert_segment()
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def new_weights_file(config: Config, num_engines: int) -> Iterator[str | None]:
    """Yield the path of memory over which so many engines share packed weights.

    None: an only one, on GPUs, or the system gives no such memory, as the log says.
    """
    if num_engines == 1 or config.device == "gpu":
        yield None
        return
    try:
        file = create_weights_file()
    except OSError as error:
        logger.warning("each engine has weights of its own: no memory can be shared: %s", error)
        yield None
        return
    try:
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


def expert_place(parallel: ParallelConfig, rank: int, file: int | None) -> ExpertPlace | None:
    """Return the place of a tensor-parallel rank's experts; None = they are not spread."""
    if file is None:
        return None
    return ExpertPlace(file, Shard(parallel.expert_rank(rank), parallel.expert_ranks), exchange_timeout_s(parallel))


def exchange_timeout_s(parallel: ParallelConfig) -> float:
    """Return how long a rank waits for others in a sum: longer than the watch, which ends hung ranks."""
    return COMPUTING_TIMEOUTS * parallel.rank_timeout_s


def log_exchange_error(error: Exception) -> None:
    """Log why the bytes of other nodes did not arrive; the op's error has no reason."""
    logger.warning("no exchange with the other nodes: %s", error)


def threads_per_rank(size: int) -> int:
    """Return a rank's share of this host's processors, at least one thread; size: ranks of this host."""
    return max(1, own_processors().num_threads // size)
