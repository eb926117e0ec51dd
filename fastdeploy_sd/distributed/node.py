"""The server on a node other than the first: starts this node's ranks, and relays the bytes of their links.

Its exit status is 0 when the first node asks it to end, and 1 when a rank or the first node fails. It is 2 when this
node cannot join: its model, configuration or secret differs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

from fastdeploy_sd.config import Config
from fastdeploy_sd.distributed.expert_process import shared_experts
from fastdeploy_sd.distributed.link import Relay
from fastdeploy_sd.distributed.node_identity import describe, node_keys
from fastdeploy_sd.distributed.node_messages import (
    CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    Disconnect,
    Ended,
    FirstNodeHeartbeat,
    FromFirst,
    FromOther,
    Join,
    Kill,
    LinkBytes,
    NodeHeartbeat,
    NodeRefused,
    Start,
    decode_from_first,
    encode,
)
from fastdeploy_sd.distributed.process import DEFAULT_RANK_WORKER
from fastdeploy_sd.distributed.starting import ExchangeStart, RankStarter
from fastdeploy_sd.distributed.watch import LocalRank, probe_pause_s
from fastdeploy_sd.errors import ConfigError, FdsdError, InternalError
from fastdeploy_sd.process.child import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    ChildProcess,
    configure_logging,
    stop_signals,
)
from fastdeploy_sd.wire.sockets import KEYS_REFUSED, Connection, Hub, resolve

logger = logging.getLogger(__name__)

_MAX_QUEUED = 4096
_RETRY_S = 0.005
_RECONNECT_S = 0.5
# So many connections must end during the key exchange: a single one may end for another reason.
_MOST_REFUSALS = 3
# From a rank's end to the first node's Disconnect.
_DISCONNECT_TIMEOUT_S = 30.0


class _EndingError(Exception):
    """This node ends. status: of the process."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status


def run(config: Config, rank_worker: str = DEFAULT_RANK_WORKER) -> int:
    """Run as one of the nodes until the first one ends; return the exit status. A failure writes a line to stderr."""
    configure_logging("node")
    stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        with _stopped_by_signals(stop_fd), shared_experts(config) as experts:
            _Node(config, rank_worker, stop_fd, *experts).run()
    except _EndingError as ending:
        if str(ending):
            print(f"error: {ending}", file=sys.stderr)
        return ending.status
    except FdsdError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    finally:
        os.close(stop_fd)
    return EXIT_OK


@contextlib.contextmanager
def _stopped_by_signals(fd: int) -> Iterator[None]:
    """Within the context, the signals that stop a server make the descriptor readable."""
    numbers = stop_signals()
    before = [signal.signal(number, lambda *_: os.eventfd_write(fd, 1)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _LocalEnd:
    """A rank of this node, and the relay of its link."""

    def __init__(self, process: LocalRank, relay: Relay, end_fd: int | None) -> None:
        self.process, self.relay, self.end_fd = process, relay, end_fd


class _Node:
    """One node's conversation with the first; one thread."""

    def __init__(
        self, config: Config, rank_worker: str, stop_fd: int, expert_file: int | None, bridge: ChildProcess | None
    ) -> None:
        parallel = config.parallel
        self._expert_file, self._bridge = expert_file, bridge
        self._config, self._rank_worker, self._stop_fd = config, rank_worker, stop_fd
        self._number = parallel.own_node()
        self._host, self._port = resolve(parallel.ips[0]), parallel.node_port
        self._silence_s = parallel.rank_timeout_s
        self._beat_s = probe_pause_s(self._silence_s)
        self._keys = node_keys(config)
        self._description = describe(config)
        self._ranks: dict[int, _LocalEnd] = {}
        self._hub = Hub(self._keys)
        self._hub.watch(stop_fd)
        self._link: Connection | None = None
        self._silent_s = 0.0
        self._last_beat = time.monotonic()
        self._waiting: list[bytes] = []
        self._ends_by: float | None = None

    def run(self) -> None:
        """Serve; raises _EndingError or FdsdError."""
        try:
            group = self._joined()
            self._start_ranks(group)
            while True:
                is_pressed = self._waiting or any(rank.relay.has_backlog for rank in self._ranks.values())
                for message in self._turn(_RETRY_S if is_pressed else self._beat_s):
                    self._follow(message)
                self._carry()
                if self._ends_by is not None and time.monotonic() > self._ends_by:
                    raise _EndingError(EXIT_FAILED, "a rank of this node has ended, and node 0 says nothing about it")
        finally:
            for rank in self._ranks.values():
                rank.process.child.close()
                rank.relay.close()
                if rank.end_fd is not None:
                    os.close(rank.end_fd)
            self._hub.close()

    # ---- joining ----------------------------------------------------------------------------------------------------

    def _joined(self) -> str:
        """Connect to the first node until it says that all have joined; return the group's name."""
        timeout_s = self._config.parallel.node_timeout_s
        logger.info("node %d looks for node 0 at %s", self._number, self._address)
        deadline = time.monotonic() + timeout_s
        num_refusals, reason = 0, "no connection"
        while True:
            try:
                return self._ask_to_join(deadline)
            except ConnectionError as error:
                reason = str(error)
            num_refusals = num_refusals + 1 if reason == KEYS_REFUSED else 0
            if num_refusals == _MOST_REFUSALS:
                raise ConfigError(f"node 0 at {self._address}: {reason}", param="pd_secret")
            if time.monotonic() > deadline:
                raise InternalError(f"node 0 at {self._address} did not answer within {timeout_s:g} s: {reason}")
            self._hub.wait(_RECONNECT_S)
            self._look_for_signal()

    @property
    def _address(self) -> str:
        return f"tcp://{self._host}:{self._port}"

    def _ask_to_join(self, deadline: float) -> str:
        self._link = Connection(self._hub, self._address, MAX_MESSAGE_BYTES, _MAX_QUEUED)
        self._silent_s = 0.0
        has_answered = False
        try:
            self._link.send(encode(Join(self._number, self._description)))
            while has_answered or time.monotonic() < deadline:
                for message in self._turn(min(self._beat_s, _RECONNECT_S)):
                    match message:
                        case Start(group):
                            return group
                        case NodeRefused(text):
                            raise ConfigError(f"node 0 refuses this node: {text}")
                        case Disconnect(text):
                            raise ConnectionError(text or "it has ended")
                        case _:
                            has_answered = True  # it has a deadline of its own for the others
            raise ConnectionError("no answer")
        except BaseException:
            self._link.close()
            self._link = None
            raise

    def _start_ranks(self, group: str) -> None:
        parallel = self._config.parallel
        exchange = ExchangeStart.of(self._keys, f"tcp://{self._host}:{self._port + 1}", group, self._number)
        per_node = parallel.ranks_per_node
        with contextlib.closing(RankStarter(self._config, self._rank_worker, exchange, self._expert_file)) as starter:
            for rank in range(self._number * per_node, (self._number + 1) * per_node):
                child, relay = starter.start_relayed(rank)
                process = LocalRank(child)
                end = _LocalEnd(process, relay, process.open_end())
                self._ranks[rank] = end
                self._hub.watch(relay.fd)
                if end.end_fd is not None:
                    self._hub.watch(end.end_fd)
        logger.info("node %d runs rank %s", self._number, " and ".join(map(str, self._ranks)))

    # ---- while ranks run --------------------------------------------------------------------------------------------

    def _turn(self, timeout_s: float) -> list[FromFirst]:
        """Wait for something to read, and return the first node's messages; raises as `_lose`, and for a signal."""
        assert self._link is not None
        self._hub.wait(timeout_s)
        self._look_for_signal()
        messages = [decode_from_first(bytes(part)) for [part] in self._link.receive()]
        if messages:
            self._silent_s = 0.0
        elif (loss := self._link.loss()) is not None:
            self._lose(loss)
        now = time.monotonic()
        elapsed_s = now - self._last_beat
        if elapsed_s >= self._beat_s:
            self._last_beat = now
            self._silent_s += min(elapsed_s, 2 * self._beat_s)
            if self._silent_s > self._silence_s:
                self._lose(f"it has given no sign of life for {self._silent_s:.0f} s")
            if not self._waiting:
                processes = {rank: end.process for rank, end in self._ranks.items()}
                stopped = tuple(rank for rank, process in processes.items() if process.is_stopped())
                self._send(NodeHeartbeat(sum(process.cpu_s() for process in processes.values()), stopped))
        return messages

    def _lose(self, why: str) -> None:
        if not self._ranks:  # it may be found again
            raise ConnectionError(why)
        raise _EndingError(EXIT_FAILED, f"node 0 at {self._address} is gone: {why}")

    def _look_for_signal(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(self._stop_fd, False)
            os.eventfd_read(self._stop_fd)
            logger.info("node %d ends because of a signal; this ends all nodes", self._number)
            raise _EndingError(EXIT_OK)

    def _follow(self, message: FromFirst) -> None:
        match message:
            case LinkBytes(rank, data) if rank in self._ranks:
                self._ranks[rank].relay.give(data)
            case Kill(ranks):
                for rank in ranks:
                    self._ranks[rank].process.kill()
            case Disconnect(""):
                logger.info("node %d ends with node 0", self._number)
                raise _EndingError(EXIT_OK)
            case Disconnect(reason):
                raise _EndingError(EXIT_FAILED, f"node 0 has ended: {reason}")
            case FirstNodeHeartbeat():
                pass
            case _:
                raise InternalError(f"node 0: expected a message to a node that runs, got {type(message).__name__}")

    def _carry(self) -> None:
        assert self._link is not None
        if self._bridge is not None and self._bridge.status is not None:
            raise _EndingError(self._bridge.status or EXIT_FAILED, "the process that shares experts has ended")
        while self._waiting and self._link.send(self._waiting[0]):
            del self._waiting[0]
        for number, rank in self._ranks.items():
            rank.relay.flush()
            status = rank.process.child.status  # read first: then the bytes before its end have arrived
            while not self._waiting and (data := rank.relay.take(CHUNK_BYTES)):
                self._send(LinkBytes(number, data))
            if status is not None and rank.end_fd is not None and not self._waiting:
                for fd in (rank.end_fd, rank.relay.fd):
                    self._hub.unwatch(fd)
                os.close(rank.end_fd)
                rank.end_fd = None
                self._send(Ended(number, rank.process.describe_end()))
                self._ends_by = time.monotonic() + _DISCONNECT_TIMEOUT_S

    def _send(self, message: FromOther) -> None:
        assert self._link is not None
        frame = encode(message)
        if self._waiting or not self._link.send(frame):
            self._waiting.append(frame)
