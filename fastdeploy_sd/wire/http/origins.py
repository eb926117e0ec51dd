"""Decides which web pages may use the server. Knows no route and no key.

A browser sends a page's requests to this machine's own addresses too, with the page's origin in a header; programs send
none. Where there is no key, only the origin tells whether a foreign page spends the machine's time. Such a page
could also read answers, by giving its own name this machine's address (DNS rebinding); the Host header shows that.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy_sd.errors import Forbidden, shown
from fastdeploy_sd.wire.http.error_format import error_response


class OriginGate:
    """Refuses requests of web pages that are not allowed.

    A preflight request of an origin that is not allowed is refused. Without keys every request of such an origin is,
    and on a loopback address also one to a Host that may be a name of the Internet, unless an allowed origin has it.
    The server's own page is allowed where its origin is an address or a local name.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], is_open: bool, host: str) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._is_open = is_open
        self._known_hosts = (
            {urlsplit(origin).hostname for origin in allowed} if is_open and _is_loopback(host) else None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" and "*" not in self._allowed else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Forbidden | None:
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host", "")
        is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        is_foreign = origin is not None and origin not in self._allowed and not self._is_own(origin, host)
        if is_foreign and (self._is_open or is_preflight):
            return Forbidden(f"Origin: expected one of allowed_origins, got {shown(origin)}", code="origin_not_allowed")
        if self._known_hosts is not None and not self._is_known(host):
            return Forbidden(
                f"Host: expected a local name, an address or the host of one of allowed_origins, got {shown(host)}",
                code="host_not_allowed",
            )
        return None

    def _is_own(self, origin: str, host: str) -> bool:
        return origin.partition("://")[2] == host and self._is_known(host)

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return _is_local(name) or _is_address(name) or name in (self._known_hosts or ())


def _is_local(name: str) -> bool:
    """Whether this cannot be a name of the Internet."""
    return "." not in name or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_local(host) or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
