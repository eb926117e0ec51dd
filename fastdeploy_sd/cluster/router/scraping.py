"""Reads the metrics of instances, for who scrapes the router alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fastdeploy_sd.errors import Unavailable
from fastdeploy_sd.wire.http_client import Ask, Headers, HttpClient, Target

_TIMEOUT_S = 2.0
_MAX_BYTES = 16 << 20
_OK = 200


async def scrape(http: HttpClient, targets: Iterable[Target], headers: Headers) -> dict[str, str | None]:
    """Return address -> the text of its /metrics, None where there was none in time or the answer was an error."""
    wanted = sorted(set(targets), key=str)
    bodies = await asyncio.gather(*(_body_of(http, target, headers) for target in wanted))
    return dict(zip(map(str, wanted), bodies, strict=True))


async def _body_of(http: HttpClient, target: Target, headers: Headers) -> str | None:
    try:
        status, body = await http.fetch(target, Ask("GET", "/metrics", headers), _MAX_BYTES, _TIMEOUT_S)
    except (TimeoutError, Unavailable):
        return None
    return body.decode("utf-8", "replace") if status == _OK and len(body) <= _MAX_BYTES else None
