"""The first node's control of the others: joining, the links to their ranks, and heartbeats.

A thread relays bytes between rank 0's links and the sockets. A node whose connection ends, or whose heartbeats stop, is
lost with all its ranks; a lost node does not come back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time

from fastdeploy_sd.config import Config
from fastdeploy_sd.distributed.exchange import FirstExchange
from fastdeploy_sd.distributed.node_identity import describe, mismatch, node_keys
from fastdeploy_sd.distributed.node_messages import (
    CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    Disconnect,
    Ended,
    FirstNodeHeartbeat,
    FromFirst,
    Join,
    Kill,
    LinkBytes,
    NodeHeartbeat,
    NodeRefused,
    Start,
    decode_from_other,
    encode,
)
from fastdeploy_sd.distributed.starting import exchange_timeout_s
from fastdeploy_sd.distributed.watch import RemoteNode, RemoteRank, probe_pause_s
from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.sockets import Hub, Listener, SendResult

logger = logging.getLogger(__name__)

_MAX_QUEUED = 4096
# The pause before a frame that found no room is sent again.
_RETRY_S = 0.005
# The timeout for the others to disconnect.
_DISCONNECT_TIMEOUT_S = 3.0


class Nodes:
    """The other nodes, joined when the constructor returns, until `close`.

    A node without a heartbeat for `timeout_rank` seconds, in which this process runs, is lost.

    Raises:
        ConfigError: the address cannot be bound, or there is no secret.
        CheckpointError: the model cannot be read.
        Unavailable: a node has not joined in time.
    """

    def __init__(self, config: Config) -> None:
        parallel = config.parallel
        self._description = describe(config)
        self._silence_s, self._beat_s = parallel.rank_timeout_s, probe_pause_s(parallel.rank_timeout_s)
        self._group = secrets.token_hex(16)
        self._refusal = ""
        self._has_started = False
        self._closing: str | None = None
        self._last_beat = time.monotonic()
        host, port, keys = parallel.ips[0], parallel.node_port, node_keys(config)
        per_node = parallel.ranks_per_node
        self._nodes = {n: RemoteNode(f"node {n} ({parallel.ips[n]})") for n in range(1, parallel.num_nodes)}
        self.ranks: dict[int, RemoteRank] = {}
        with contextlib.ExitStack() as undo:
            self._hub = Hub(keys)
            undo.callback(self._hub.close)
            self._listener = Listener(self._hub, host, port, MAX_MESSAGE_BYTES, _MAX_QUEUED, "node_port")
            self.exchange = FirstExchange(
                keys, host, port + 1, self._group, parallel.num_nodes, exchange_timeout_s(parallel)
            )
            undo.callback(self.exchange.close)
            logger.info("waiting for %s at %s", self._missing(), self._listener.address)
            self._wait_joined(parallel.node_timeout_s)
            undo.pop_all()
        for number, node in self._nodes.items():
            node.ranks = {r: RemoteRank(r, node) for r in range(number * per_node, (number + 1) * per_node)}
            self.ranks |= node.ranks
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        for fd in (self._wake, *(rank.relay.fd for rank in self.ranks.values())):
            self._hub.watch(fd)
        self._has_started = True
        for node in self._nodes.values():
            self._send(node, Start(self._group))
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def close(self, reason: str) -> None:
        """Tell the other nodes to end, with an error unless the reason is "". Nothing is left here."""
        self._closing = reason
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for rank in self.ranks.values():
            rank.close()
        self._hub.close()
        os.close(self._wake)
        self.exchange.close()

    # ---- before the ranks run ---------------------------------------------------------------------------------------

    def _missing(self) -> str:
        return ", ".join(node.name for node in self._nodes.values() if node.identity is None)

    def _wait_joined(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._missing():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                because = f"; refused: {self._refusal}" if self._refusal else ""
                raise Unavailable(f"{self._missing()} did not join within {timeout_s:g} s{because}")
            self._turn(min(left_s, self._beat_s))

    def _join(self, identity: bytes, join: Join) -> None:
        node = self._nodes.get(join.node)
        refusal = mismatch(self._description, join.description)
        if node is None:
            refusal = f"node_rank: expected 1..{len(self._nodes)}, got {join.node}"
        elif self._has_started:
            refusal = f"node_rank: expected one that has not joined, got {join.node}"
        if refusal or node is None:
            self._refusal = f"node {join.node}: {refusal}"
            logger.warning("refused a node: %s", self._refusal)
            self._listener.send(identity, encode(NodeRefused(refusal or "")), [])
            return
        if node.identity is not None:  # started anew, or it has lost the connection
            self._listener.send(node.identity, encode(NodeRefused(f"another process has joined as {node.name}")), [])
        node.identity, node.silent_s = identity, 0.0
        logger.info("%s has joined", node.name)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._closing is None:
                is_pressed = any(node.waiting for node in self._nodes.values())
                is_pressed = is_pressed or any(rank.relay.has_backlog for rank in self.ranks.values())
                self._turn(_RETRY_S if is_pressed else self._beat_s)
                self._carry()
            self._carry()
            self._disconnect_nodes(self._closing)
        except Exception as error:
            logger.exception("the connections to the other nodes broke")
            for node in self._nodes.values():
                self._lose(node, f"whose connection broke: {error!r}")

    def _turn(self, timeout_s: float) -> None:
        """Wait for something to read, read it, and send heartbeats when they are due."""
        self._hub.wait(timeout_s)
        for identity, frame in self._listener.receive():
            try:
                self._take(identity, frame)
            except ProtocolError as error:
                logger.warning("from another node: %s", error.message)
        now = time.monotonic()
        elapsed_s = now - self._last_beat
        if elapsed_s >= self._beat_s:
            self._last_beat = now
            for node in self._nodes.values():
                self._beat(node, min(elapsed_s, 2 * self._beat_s))

    def _take(self, identity: bytes, frame: bytes) -> None:
        message = decode_from_other(frame)
        if isinstance(message, Join):
            self._join(identity, message)
            return
        node = next((n for n in self._nodes.values() if n.identity == identity and not n.is_lost), None)
        if node is None:
            return
        node.silent_s = 0.0
        match message:
            case NodeHeartbeat(cpu_s, stopped):
                node.cpu_s, node.stopped = cpu_s, stopped
            case LinkBytes(rank, data) if rank in node.ranks:
                node.ranks[rank].relay.give(data)
            case Ended(rank, how) if rank in node.ranks:
                self._end(node.ranks[rank], f"{how} on {node.name}")
            case _:
                raise ProtocolError(f"{node.name}: expected one of its ranks, got {message}")

    def _beat(self, node: RemoteNode, elapsed_s: float) -> None:
        if node.identity is None or node.is_lost:
            return
        node.silent_s += elapsed_s
        if node.silent_s > self._silence_s:
            self._lose(node, f"which has given no sign of life for {node.silent_s:.0f} s")
        elif not node.waiting:
            self._send(node, FirstNodeHeartbeat())

    def _carry(self) -> None:
        for node in self._nodes.values():
            while node.waiting and self._has_sent(node, node.waiting[0]):
                node.waiting.popleft()
            while node.to_kill:
                self._send(node, Kill((node.to_kill.popleft(),)))
            for number, rank in node.ranks.items():
                rank.relay.flush()
                while rank.is_open and not node.waiting and (data := rank.relay.take(CHUNK_BYTES)) != b"":
                    if data is None:  # rank 0 has closed the link
                        self._close_link(rank)
                    else:
                        self._send(node, LinkBytes(number, data))

    def _send(self, node: RemoteNode, message: FromFirst) -> None:
        frame = encode(message)
        if node.waiting or not self._has_sent(node, frame):
            node.waiting.append(frame)

    def _has_sent(self, node: RemoteNode, frame: bytes) -> bool:
        """Return whether the frame need not be sent again."""
        if node.is_lost or node.identity is None:
            return True
        delivery = self._listener.send(node.identity, frame, [])
        if delivery is SendResult.GONE:
            self._lose(node, "whose connection has ended")
        return delivery is not SendResult.FULL

    def _lose(self, node: RemoteNode, why: str) -> None:
        if not self._has_started:  # it may join again
            logger.info("%s has left, %s", node.name, why)
            node.identity, node.silent_s = None, 0.0
            return
        node.is_lost = True
        for rank in node.ranks.values():
            self._end(rank, f"is gone with {node.name}, {why}")

    def _end(self, rank: RemoteRank, how: str) -> None:
        self._close_link(rank)
        rank.end(how)

    def _close_link(self, rank: RemoteRank) -> None:
        if rank.is_open:
            self._hub.unwatch(rank.relay.fd)
            rank.is_open = False
            rank.relay.close()

    def _disconnect_nodes(self, reason: str) -> None:
        """Tell every node to end, and wait until all have disconnected: a socket drops its queue when it closes."""
        deadline = time.monotonic() + _DISCONNECT_TIMEOUT_S
        for node in self._nodes.values():
            self._send(node, Disconnect(reason))
        while not all(node.is_lost for node in self._nodes.values()) and time.monotonic() < deadline:
            self._hub.wait(_RETRY_S)
            for _ in self._listener.receive():
                pass
            for node in self._nodes.values():
                self._send(node, FirstNodeHeartbeat())
