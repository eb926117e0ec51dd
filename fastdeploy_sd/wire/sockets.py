"""The TCP sockets between instances: ZeroMQ with CURVE, so that every byte is encrypted and both ends hold the secret.

One key pair for all that take orders and one for all that give them, both derived from the deployment's secret. A
client without the second is refused by the allow-list (ZAP) before a message of it is read; a server without the
first cannot even complete the handshake. The only file here that imports zmq. Knows no message.
"""

from __future__ import annotations

import enum
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from fastdeploy_sd.errors import ConfigError

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_FRAMES = 6
_HANDSHAKE_MS = 5000
# What is read from one socket before the others have their turn.
_FRAMES_PER_TURN = 64
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
KEYS_REFUSED = "the connection ended while keys were compared: is the other pd_secret another one?"
_REJECTED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The key pairs of a deployment, Z85 text."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def of(cls, server_secret: bytes, client_secret: bytes) -> CurveKeys:
        """Return the pairs of two secrets of 32 bytes each."""
        server, client = z85.encode(server_secret), z85.encode(client_secret)
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client)


class SendResult(enum.Enum):
    """What became of a message that was to be queued."""

    QUEUED = enum.auto()
    GONE = enum.auto()  # the peer is not connected
    FULL = enum.auto()  # it reads too slowly


class Hub:
    """The sockets of one thread, their allow-list, and waiting for all of them; `keys`: of the deployment."""

    def __init__(self, keys: CurveKeys) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.IO_THREADS, 1)
        self.keys = keys
        self._client_key = z85.decode(keys.client_public)
        self._poller = zmq.Poller()
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        self._poller.register(self._zap, zmq.POLLIN)

    def watch(self, source: int | zmq.Socket[bytes]) -> None:
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: int | zmq.Socket[bytes]) -> None:
        """Undo `watch`; before it is closed."""
        self._poller.unregister(source)

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        return made

    def wait(self, timeout_s: float) -> None:
        """Block until something that is watched can be read, or the time is over; answer the allow-list's questions."""
        self._poller.poll(max(0, round(timeout_s * 1000)))
        while cast(int, self._zap.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._judge(self._zap.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _judge(self, question: list[bytes]) -> None:
        version, request_id, *_, mechanism, key = question if len(question) > _ZAP_FRAMES else [b""] * (_ZAP_FRAMES + 1)
        is_known = mechanism == b"CURVE" and key == self._client_key
        code, text = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        self._zap.send_multipart([version, request_id, code, text, b"", b""], zmq.NOBLOCK)


class Listener:
    """Takes connections of those who know the secret, at `address`; ConfigError: it cannot be bound.

    A peer that sends more than `max_frame_bytes` is disconnected before it takes memory. `max_queued` messages may wait
    per peer in each direction.
    """

    def __init__(
        self, hub: Hub, host: str, port: int, max_frame_bytes: int, max_queued: int, option: str = "pd_comm_port"
    ) -> None:
        self._hub = hub
        self._socket = hub.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, hub.keys.server_secret)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"pd")
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.set_hwm(max_queued)
        try:
            literal = resolve(host)
            self._socket.setsockopt(zmq.IPV6, literal.startswith("["))
            self._socket.bind(f"tcp://{literal}:{port or '*'}")
        except (zmq.ZMQError, OSError) as error:
            self._socket.close(0)
            text = f"{option}: expected a free port of {host}, got {port or 'any'}: {error}"
            raise ConfigError(text, param=option) from None
        self.address = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode()
        hub.watch(self._socket)

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (identity, frame) of what has arrived; a message of several parts, which no peer sends, as b""."""
        for _ in range(_FRAMES_PER_TURN):
            if not cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            yield identity, parts[0] if len(parts) == 1 else b""

    def send(self, identity: bytes, frame: bytes, payloads: list[bytearray]) -> SendResult:
        """Queue a message, never blocking."""
        try:
            self._socket.send_multipart([identity, frame, *payloads], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendResult.GONE
            raise
        return SendResult.QUEUED

    def close(self) -> None:
        self._hub.unwatch(self._socket)
        self._socket.close(0)


class Connection:
    """A connection to one listener, which is not made anew when it is lost; OSError: the address is none."""

    def __init__(self, hub: Hub, address: str, max_frame_bytes: int, max_queued: int) -> None:
        self._hub = hub
        self._socket = hub.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, hub.keys.server_public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, hub.keys.client_public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, hub.keys.client_secret)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.IPV6, 1)  # also; a bound socket with it would name its IPv4 address as IPv6
        self._socket.set_hwm(max_queued)
        self._monitor = self._socket.get_monitor_socket(_LOST | _REJECTED)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise OSError(f"expected an address like tcp://host:port, got {address!r}: {error}") from None
        hub.watch(self._socket)
        hub.watch(self._monitor)

    def receive(self) -> Iterator[list[memoryview]]:
        """Yield the parts of each message that has arrived."""
        for _ in range(_FRAMES_PER_TURN):
            if not cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            yield [part.buffer for part in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]

    def send(self, frame: bytes) -> bool:
        """Queue a message, never blocking; False when too many wait already."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def loss(self) -> str | None:
        """Return why the connection is of no more use, None while nothing says so."""
        lost = None
        while cast(int, self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event & _REJECTED:
                return KEYS_REFUSED
            lost = "no connection"
        return lost

    def close(self) -> None:
        self._hub.unwatch(self._socket)
        self._hub.unwatch(self._monitor)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


def is_loopback(address: str) -> bool:
    """Whether a host, or that of "tcp://host:port", can be reached from this machine only. No name is resolved."""
    host = address.removeprefix("tcp://").rpartition(":")[0] if address.startswith("tcp://") else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def resolve(host: str) -> str:
    """Return a host as ZeroMQ binds it: a numeric address, in brackets if it is one of IPv6. May take seconds. OSError:
    the name is unknown.
    """
    address = str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    return f"[{address}]" if ":" in address else address
