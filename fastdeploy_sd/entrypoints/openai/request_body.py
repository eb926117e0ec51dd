"""Reads the bytes of a request's body. Owns the size limit. Knows no field and no engine."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from fastdeploy_sd.errors import PayloadTooLarge


async def read_body(request: HttpRequest, max_body_bytes: int) -> bytes:
    """Return the body of a request, reading no more than the limit allows.

    Raises:
        PayloadTooLarge: it is longer; also when it comes in chunks without a declared length.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body_bytes:
        raise _too_large(max_body_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_body_bytes:
            raise _too_large(max_body_bytes)
    return bytes(body)


def _too_large(max_body_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"body: expected at most {max_body_bytes} bytes, got more", code="body_too_large")
