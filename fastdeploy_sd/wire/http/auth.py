"""Bearer authentication as ASGI middleware. Knows nothing of what it protects."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fastdeploy_sd.errors import Unauthorized
from fastdeploy_sd.wire.http.error_format import error_response

BY_KEY = "key "
_KEY_INDEX = "fastdeploy_sd.key_index"  # entry of the scope: which of several keys a request carried

# Probes of load balancers carry no key and learn nothing but "up" or "down".
_OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/ready"})


def client_of(scope: Scope) -> str:
    """Return by what a client is told from others: `key N` where there are several keys, else its address."""
    if _KEY_INDEX in scope:
        return f"{BY_KEY}{scope[_KEY_INDEX]}"
    address, _ = scope.get("client") or ("", 0)
    return f"address {address}"


class BearerAuth:
    """Lets a request pass when it carries one of the keys; without any key configured, always.

    Every key is compared in constant time and none is skipped, so the time of a refusal tells nothing. `open_paths`:
    need no key, as those of health.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._open_paths = _OPEN_PATHS.union(open_paths)
        self._keys = [key.encode("ascii") for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("Authorization: expected 'Bearer <one of the server's API keys>'", code="invalid_api_key")
        await error_response(error)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"] in self._open_paths or self._is_authorized(scope)

    def _is_authorized(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        given = headers.get("authorization", "").encode("latin-1")  # the header's own bytes
        scheme, _, token = given.partition(b" ")
        if not given and "x-api-key" in headers:  # Anthropic's clients
            scheme, token = b"bearer", headers["x-api-key"].encode("latin-1")
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            return False
        if len(matches) > 1:
            scope[_KEY_INDEX] = matches.index(True)
        return True
