"""Lets ranks of several commands share experts: it carries what their memory is told of one another.

Each command (a host's, or that of one engine) has such an end, with a connection to that of every other one. The
earlier of two listens. A command that is lost may come back within `timeout_nodes` seconds: its experts are waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field

from fastdeploy_sd.config import Config
from fastdeploy_sd.device.expert_mirror import MAGIC, ExpertMirror
from fastdeploy_sd.distributed.expert_messages import (
    BridgeHeartbeat,
    BridgeRefused,
    Greet,
    Leave,
    Welcome,
    decode,
    encode,
)
from fastdeploy_sd.distributed.node_identity import describe, mismatch, node_keys
from fastdeploy_sd.distributed.watch import probe_pause_s
from fastdeploy_sd.errors import ConfigError, Unavailable
from fastdeploy_sd.wire.codec import ProtocolError
from fastdeploy_sd.wire.sockets import KEYS_REFUSED, Connection, Hub, Listener, SendResult, resolve

logger = logging.getLogger(__name__)

_MAX_QUEUED = 4096
# Tables and states change without a call.
_LOOK_S = 0.02
# The pause before a frame that found no room is sent again, and that before a connection is made again.
_RETRY_S, _RECONNECT_S = 0.005, 0.5
# So many connections must end during the key exchange: a single one may end for another reason.
_MOST_REFUSALS = 3
# The timeout for the others to hear that this one leaves.
_LEAVE_S = 1.0


@dataclass
class _Peer:
    """Another command: its connection to this one's listener, or this one's to it.

    Attributes:
        identity, link: of the connection, the one or the other.
        absent_s: since it has joined last, or since the start.
    """

    place: int
    name: str
    address: str
    identity: bytes | None = None
    link: Connection | None = None
    is_joined: bool = False
    has_joined_before: bool = False
    num_refusals: int = 0
    silent_s: float = 0.0
    absent_s: float = 0.0
    connects_at: float = 0.0
    waiting: deque[bytes] = field(default_factory=deque)


class ExpertBridge:
    """This command's end of all connections; one thread, but for `leave`.

    Args:
        file: descriptor of the memory over which the command's ranks share experts.

    Raises CheckpointError, ConfigError: as `describe` and `node_keys`.
    """

    def __init__(self, config: Config, file: int) -> None:
        parallel = config.parallel
        places, self._own = parallel.expert_places, parallel.own_expert_place()
        self._place, self._count, self._file = places[self._own], len(places), file
        self._silence_s, self._absence_s = parallel.rank_timeout_s, parallel.node_timeout_s
        self._beat_s = probe_pause_s(self._silence_s)
        self._description = {**describe(config), "commands that share experts": str(self._count)}
        self._peers = [
            _Peer(place, f"host {host}, port {port}", f"tcp://{resolve(host)}:{port}")
            for place, (host, port) in enumerate(places)
            if place != self._own
        ]
        self._hub = Hub(node_keys(config))
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._hub.watch(self._news)
        self._listener: Listener | None = None
        self._mirror: ExpertMirror
        self._leaves_by: float | None = None
        self._is_asked_to_leave = False
        self._last_beat = time.monotonic()

    def leave(self) -> None:
        """Have `run` return soon, after the others have heard what this command's ranks last said."""
        self._is_asked_to_leave = True
        os.eventfd_write(self._news, 1)

    def run(self) -> None:
        """Carry frames until `leave`.

        Raises:
            ConfigError: the port is taken, another secret, or a command that computes something else.
            Unavailable: a command has not joined in time, or has not come back.
        """
        if not self._has_opened():
            return
        if self._own < self._count - 1:
            host, port = self._place
            frame_bytes = max(self._mirror.frame_bytes, 1 << 16)
            self._listener = Listener(self._hub, host, port, frame_bytes, _MAX_QUEUED, "node_port")
        while not self._has_left():
            self._hub.wait(_RETRY_S if any(peer.waiting for peer in self._peers) else _LOOK_S)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._news)
            self._receive()
            for peer in self._peers:
                self._carry(peer)
            self._beat()

    def close(self) -> None:
        self._hub.close()

    def _has_opened(self) -> bool:
        """Wait until a rank has given the memory its shape."""
        while not self._is_asked_to_leave:
            mirror = ExpertMirror.open(self._file, self._own, self._count, self._news)
            if mirror is not None:
                self._mirror = mirror
                return True
            self._hub.wait(_LOOK_S)
        return False

    def _has_left(self) -> bool:
        if not self._is_asked_to_leave:
            return False
        if self._leaves_by is None:
            self._leaves_by = time.monotonic() + _LEAVE_S
            for peer in self._peers:
                self._carry(peer)
                self._say(peer, Leave())
        return time.monotonic() > self._leaves_by or not any(peer.is_joined for peer in self._peers)

    # ---- what arrives -----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        if self._listener is not None:
            for identity, frame in self._listener.receive():
                peer = next((p for p in self._peers if p.identity == identity), None)
                if peer is not None:
                    self._take(peer, frame)
                elif frame[: len(MAGIC)] != MAGIC:  # of a connection that was given up
                    self._greet(identity, frame)
        for peer in self._peers:
            if peer.place < self._own:
                self._receive_from(peer)

    def _receive_from(self, peer: _Peer) -> None:
        """Read what an earlier command says, to which this one connects."""
        if peer.link is None:
            if time.monotonic() < peer.connects_at or self._leaves_by is not None:
                return
            peer.link = Connection(self._hub, peer.address, max(self._mirror.frame_bytes, 1 << 16), _MAX_QUEUED)
            peer.link.send(encode(Greet(self._own, self._description)))
        for [part] in peer.link.receive():
            self._take(peer, part)
            if peer.link is None:
                return
        if (loss := peer.link.loss()) is not None:
            peer.num_refusals = peer.num_refusals + 1 if loss == KEYS_REFUSED else 0
            if peer.num_refusals == _MOST_REFUSALS:
                raise ConfigError(f"{peer.name}: {loss}", param="pd_secret")
            self._lose(peer, loss)

    def _greet(self, identity: bytes, frame: bytes) -> None:
        try:
            message = decode(frame)
        except ProtocolError as error:
            logger.warning("from a command that shares experts: %s", error.message)
            return
        if not isinstance(message, Greet):
            return
        refusal = mismatch(self._description, message.description)
        peer = next((p for p in self._peers if p.place == message.place and p.place > self._own), None)
        if peer is None:
            refusal = f"its place: expected {self._own + 1} to {self._count - 1}, got {message.place}"
        if refusal or peer is None:
            logger.warning("refused a command that would share experts: %s", refusal)
            assert self._listener is not None
            self._listener.send(identity, encode(BridgeRefused(refusal or "")), [])
            return
        if peer.identity is not None:
            self._lose(peer, "it has connected anew")
        peer.identity = identity
        self._say(peer, Welcome())
        self._join(peer)

    def _take(self, peer: _Peer, frame: bytes | memoryview) -> None:
        peer.silent_s = 0.0
        try:
            if frame[: len(MAGIC)] == MAGIC:
                if peer.is_joined:
                    self._mirror.apply(peer.place, frame)
                return
            message = decode(frame)
        except (ValueError, ProtocolError) as error:
            self._lose(peer, str(error))
            return
        match message:
            case Welcome():
                self._join(peer)
            case BridgeRefused(reason):
                raise ConfigError(f"{peer.name} refuses to share experts: {reason}")
            case Leave():
                if self._leaves_by is None:
                    self._say(peer, Leave())
                self._part(peer, "it has left")
            case Greet():  # it has started anew, over the same connection
                self._lose(peer, "it has connected anew")
            case _:
                pass

    def _join(self, peer: _Peer) -> None:
        peer.is_joined, peer.absent_s, peer.num_refusals = True, 0.0, 0
        self._mirror.begin(peer.place)
        logger.info("%s shares its experts%s", peer.name, " again" if peer.has_joined_before else "")
        peer.has_joined_before = True

    def _part(self, peer: _Peer, why: str) -> None:
        """The ranks of the command are lost until it joins again."""
        if peer.is_joined:
            peer.is_joined = False
            self._mirror.lose(peer.place)
            if self._leaves_by is None:
                logger.warning("the experts of %s are lost: %s", peer.name, why)

    def _lose(self, peer: _Peer, why: str) -> None:
        self._part(peer, why)
        peer.silent_s, peer.identity = 0.0, None
        peer.waiting.clear()
        peer.connects_at = time.monotonic() + _RECONNECT_S
        if peer.link is not None:
            peer.link.close()
            peer.link = None

    # ---- what is sent -----------------------------------------------------------------------------------------------

    def _carry(self, peer: _Peer) -> None:
        while peer.waiting and self._has_sent(peer, peer.waiting[0]):
            if peer.waiting:  # else it was lost
                peer.waiting.popleft()
        while peer.is_joined and not peer.waiting and (frame := self._mirror.collect(peer.place)):
            self._send(peer, frame)

    def _say(self, peer: _Peer, message: Welcome | BridgeHeartbeat | Leave) -> None:
        self._send(peer, encode(message))

    def _send(self, peer: _Peer, frame: bytes) -> None:
        if peer.waiting or not self._has_sent(peer, frame):
            peer.waiting.append(frame)

    def _has_sent(self, peer: _Peer, frame: bytes) -> bool:
        """Return whether the frame need not be sent again."""
        if peer.link is not None:
            return peer.link.send(frame)
        if self._listener is None or peer.identity is None:
            return True
        delivery = self._listener.send(peer.identity, frame, [])
        if delivery is SendResult.GONE:
            self._lose(peer, "its connection has ended")
        return delivery is not SendResult.FULL

    def _beat(self) -> None:
        now = time.monotonic()
        elapsed_s = now - self._last_beat
        if elapsed_s < self._beat_s:
            return
        self._last_beat = now
        elapsed_s = min(elapsed_s, 2 * self._beat_s)  # time in which this process was stopped does not count
        for peer in self._peers:
            if not peer.is_joined:
                self._miss(peer, elapsed_s)
                continue
            peer.silent_s += elapsed_s
            if peer.silent_s > self._silence_s:
                self._lose(peer, f"it has given no sign of life for {peer.silent_s:.0f} s")
            elif not peer.waiting:
                self._say(peer, BridgeHeartbeat())

    def _miss(self, peer: _Peer, elapsed_s: float) -> None:
        peer.absent_s += elapsed_s
        if peer.absent_s > self._absence_s and self._leaves_by is None:
            what = "did not come back to share its experts" if peer.has_joined_before else "did not share its experts"
            raise Unavailable(f"{peer.name} {what} within {self._absence_s:g} s")
