"""What a router adds to a client's request: who computes the prompt's KV, and what a stream has shown already.

The header X-Fdsd-Route is the base64 of a signed frame; it covers the body by its digest, so it is good for this
request, at this instance, once, for a minute. Times are the instance's: its messages tell the router its monotonic
clock, so that the clocks of two machines never meet. A stream that is resumed has its progress after the client's body,
whose length the route says: token ids may be too many for a header. Knows no HTTP library.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastdeploy_sd.errors import Forbidden
from fastdeploy_sd.types import KvSource, TokenLogprob
from fastdeploy_sd.wire.codec import ProtocolError, pack, unpack
from fastdeploy_sd.wire.protocol import Protocol, SignatureError, SignedCodec

logger = logging.getLogger(__name__)

ROUTE_HEADER = "X-Fdsd-Route"
NOT_AUTHENTIC = "route_not_authentic"
# The headers of a request may take so long to be read by a busy instance.
LIFE_S = 60.0
_MAX_ROUTE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """What the client has got of one choice.

    Attributes:
        token_ids: those of everything that was sent, also where their text is still held back.
        is_finished: its last chunk has been sent.
        num_cached_tokens: what its usage says of the prefix cache.
        logprobs: of these tokens, where a later event repeats them; else ().
    """

    token_ids: tuple[int, ...] = ()
    is_finished: bool = False
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """What the client has got of a stream; `is_counted`: the chunk with its usage has been sent. adapter_digest: of the
    adapter that it runs with, "" = none.
    """

    job_id: str
    created: int
    seeds: tuple[int, ...]
    choices: tuple[ChoiceProgress, ...]
    is_counted: bool = False
    num_events: int = 0
    adapter_digest: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """A router's word to an instance about one request.

    Attributes:
        instance_id: who shall serve it.
        nonce: of this route only; the instance takes it once.
        expiry: in seconds, by the instance's monotonic clock.
        num_body_bytes: of the client's body; a Progress in msgpack is what follows, if anything does.
        num_bytes, digest: of everything that follows the headers; the digest is SHA-256.
        client: who sent the request to the router, as `client_of` names it.
    """

    instance_id: str
    nonce: str
    expiry: float
    num_body_bytes: int
    num_bytes: int
    digest: str
    kv_source: KvSource | None = None
    client: str = ""


_PROTOCOL = Protocol(6, Route)


class Recipient(NamedTuple):
    """The instance that a route is for, and what its monotonic clock says."""

    instance_id: str
    now: float


def make_route(
    key: bytes, to: Recipient, body: bytes, progress: Progress | None, kv_source: KvSource | None, client: str
) -> tuple[str, bytes]:
    """Return the value of the header, and the bytes to send as the body."""
    content = body if progress is None else body + pack(progress)
    digest = hashlib.sha256(content).hexdigest()
    nonce = secrets.token_hex(16)
    expiry = to.now + LIFE_S
    route = Route(to.instance_id, nonce, expiry, len(body), len(content), digest, kv_source, client)
    return base64.urlsafe_b64encode(_codec_for(key).encode(ROUTE_HEADER, route)).decode("ascii"), content


def _codec_for(key: bytes) -> SignedCodec:
    return SignedCodec(_PROTOCOL, key, "router", _MAX_ROUTE_BYTES)


class RouteReader:
    """Reads the routes to the instances of one server, each once; `clock` is its monotonic one."""

    def __init__(self, key: bytes, instance_ids: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._codec, self._instance_ids, self._clock = _codec_for(key), tuple(instance_ids), clock
        self._used: dict[str, float] = {}  # nonce -> expiry; only routers of the deployment can add one

    def read(self, header: str) -> Route:
        """Return the route in a header, whose body has not been read yet; Forbidden says why it does not count."""
        try:
            route = self._codec.decode(ROUTE_HEADER, Route, base64.urlsafe_b64decode(header))
        except (SignatureError, ValueError):  # a text that is no base64 has no signature
            wanted = "the signature of a router with this deployment's secret (pd_secret)"
            raise _refused(wanted, "another one") from None
        except ProtocolError as error:
            raise _refused(f"a route of version {_PROTOCOL.version}", f"another form ({error})") from None
        if route.instance_id not in self._instance_ids:
            raise _refused("a route to this instance", "one to another, or to an earlier start of this one")
        self._use(route)
        return route

    def engine_of(self, route: Route) -> int | None:
        """Return the engine that a route names, None where the server has only one."""
        return self._instance_ids.index(route.instance_id) if len(self._instance_ids) > 1 else None

    def _use(self, route: Route) -> None:
        now = self._clock()
        left_s = route.expiry - now
        if not 0 < left_s < 2 * LIFE_S:
            got = f"one that ends at {route.expiry:.1f} s: it was kept, or the router does not know this clock"
            logger.warning("a route is refused: this instance's monotonic clock is %.1f s; got %s", now, got)
            raise _refused(f"a route that ends within {LIFE_S:g} s of {now:.1f} s", got)
        while self._used and (oldest := next(iter(self._used.items())))[1] <= now:
            del self._used[oldest[0]]
        if route.nonce in self._used:
            raise _refused("a new route", "one that was used before")
        self._used[route.nonce] = route.expiry


def read_content(route: Route, content: bytes) -> tuple[bytes, Progress | None]:
    """Return the client's body and the progress after it, if there is any; Forbidden: it is not the route's."""
    if hashlib.sha256(content).hexdigest() != route.digest:
        raise _refused("a route to this body", "one to another")
    rest = content[route.num_body_bytes :]
    try:
        return content[: route.num_body_bytes], unpack(Progress, rest) if rest else None
    except ProtocolError as error:
        raise _refused("a body that ends with its progress", f"another form ({error.message})") from None


def _refused(expected: str, got: str) -> Forbidden:
    return Forbidden(f"{ROUTE_HEADER}: expected {expected}, got {got}", code=NOT_AUTHENTIC)
