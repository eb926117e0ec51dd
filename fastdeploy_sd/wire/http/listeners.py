"""The sockets a server listens on: the API's and, where it is asked for, another for metrics. Knows no HTTP."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fastdeploy_sd.config import ServerConfig
from fastdeploy_sd.errors import ConfigError

_BACKLOG = 2048
_API, _METRICS = "listener", "metrics_listener"

_EXAMPLE_BODY = '{"prompt": "def add(a, b):", "max_tokens": 40, "temperature": 0}'


@dataclass(frozen=True, slots=True)
class Listeners:
    """Sockets that are bound, one for `metrics` if that has a port of its own; until they listen they refuse."""

    api: socket.socket
    metrics: socket.socket | None = None

    def __iter__(self) -> Iterator[socket.socket]:
        return iter([self.api] if self.metrics is None else [self.api, self.metrics])

    def listen(self, server: ServerConfig) -> None:
        """Take connections from now on; ConfigError: another process has bound an address too, and was first."""
        for listener, port, name in zip(self, _ports(server), ("port", "metrics_port"), strict=False):
            try:
                listener.listen(_BACKLOG)
            except OSError as error:
                raise _address_error(server.host, port, name, error) from None

    def close(self) -> None:
        """From now on connections are refused instead of kept waiting."""
        for listener in self:
            listener.close()

    def to_start(self) -> dict[str, str]:
        """Return what a child process needs to have the same sockets, by `from_start`; it must inherit them."""
        return {name: str(listener.fileno()) for name, listener in zip((_API, _METRICS), self, strict=False)}

    @classmethod
    def from_start(cls, start: Mapping[str, str]) -> Listeners:
        return cls(*(socket.socket(fileno=int(start[name])) for name in (_API, _METRICS) if name in start))


@contextlib.contextmanager
def bound(server: ServerConfig) -> Iterator[Listeners]:
    """Reserve the configured addresses until the end of the block; ConfigError: host or a port cannot be used; the text
    names both.
    """
    with contextlib.ExitStack() as stack:
        names = ("port", "metrics_port")
        sockets = [
            stack.enter_context(_bind(server.host, port, name))
            for port, name in zip(_ports(server), names, strict=False)
        ]
        yield Listeners(*sockets)


def url_of(listener: socket.socket) -> str:
    """Return the address of a bound socket as the beginning of a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def example_request(server: ServerConfig, listener: socket.socket) -> str:
    """Return a shell command that has this machine complete a text; an API key is left for the reader to fill in."""
    url = url_of(listener)
    for every_address, own in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        url = url.replace(every_address, own)
    key = "-H 'Authorization: Bearer YOUR_KEY' " if server.api_key else ""
    return f"curl {url}/v1/completions {key}-d '{_EXAMPLE_BODY}'"


def _ports(server: ServerConfig) -> list[int]:
    port = server.metrics_port
    return [server.port] if port is None or (port == server.port and port > 0) else [server.port, port]


def _bind(host: str, port: int, name: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _address_error(host, port, name, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections in TIME_WAIT do not matter
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _address_error(host, port, name, error) from None
    return listener


def _address_error(host: str, port: int, name: str, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(f"host, {name}: expected a free address, got {host}:{port}: {reason}", param=name)
