"""Reads bodies of requests within two limits: of each, and of all large ones together. Knows no JSON and no engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.requests import Request as HttpRequest

from fastdeploy_sd.errors import Overloaded, PayloadTooLarge

# Bytes of each body that do not count as large: there are as many small ones as there are connections.
_SMALL_BYTES = 1 << 16


class BodyReader:
    """Reads the bodies of one process, of which `max_largest` of the largest size may be there at once."""

    def __init__(self, max_body_bytes: int, max_largest: int = 4) -> None:
        self._max_bytes = max_body_bytes
        self._num_free = max(max_largest * max_body_bytes, _SMALL_BYTES)

    @asynccontextmanager
    async def read(self, request: HttpRequest, num_more_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        """Read a body, which counts against the limit of all until the end of the block.

        `num_more_bytes` may it have beyond the limit of each, because a router added them. Raises PayloadTooLarge,
        Overloaded where too many large bodies are here, or ClientDisconnect.
        """
        declared = request.headers.get("content-length", "")
        max_bytes = self._max_bytes + num_more_bytes
        if declared.isdigit() and int(declared) > max_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        num_bytes = num_counted = 0
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise self._too_large()
                num_more = max(num_bytes - _SMALL_BYTES, 0) - num_counted
                if num_more > self._num_free:
                    raise Overloaded("body: expected fewer large bodies at once in this server, got more: try again")
                self._num_free -= num_more
                num_counted += num_more
                chunks.append(chunk)
            content = b"".join(chunks)
            chunks.clear()
            yield content
        finally:
            self._num_free += num_counted

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"body: expected at most {self._max_bytes} bytes, got more", code="body_too_large")
