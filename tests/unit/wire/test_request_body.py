"""Bodies are read within the limit of each and the limit of all large ones together."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from fastdeploy_sd.errors import Overloaded, PayloadTooLarge
from fastdeploy_sd.wire.http.request_body import BodyReader

LIMIT = 1 << 20
CHUNK = b"x" * (1 << 16)


def request(content: bytes, declared: int | None = None) -> HttpRequest:
    """A request whose body comes in chunks."""
    chunks = [content[i : i + len(CHUNK)] for i in range(0, len(content), len(CHUNK))]

    async def receive() -> dict[str, Any]:
        body = chunks.pop(0) if chunks else b""
        return {"type": "http.request", "body": body, "more_body": bool(chunks)}

    headers = [] if declared is None else [(b"content-length", str(declared).encode())]
    return HttpRequest({"type": "http", "method": "POST", "headers": headers}, receive)


async def read(reader: BodyReader, content: bytes, declared: int | None = None) -> bytes:
    async with reader.read(request(content, declared)) as body:
        return body


@pytest.mark.parametrize("size", [0, 1, len(CHUNK), len(CHUNK) + 1, LIMIT])
async def test_a_body_is_read_whole(size: int) -> None:
    content = bytes(i % 251 for i in range(size))
    assert await read(BodyReader(LIMIT), content) == content


async def test_a_body_beyond_the_limit_is_refused_with_and_without_a_declared_length() -> None:
    with pytest.raises(PayloadTooLarge):
        await read(BodyReader(LIMIT), b"", LIMIT + 1)
    with pytest.raises(PayloadTooLarge):
        await read(BodyReader(LIMIT), b"x" * (LIMIT + 1))


async def test_large_bodies_at_once_have_a_limit_and_small_ones_pass_beside_them() -> None:
    reader = BodyReader(LIMIT)
    large = b"x" * LIMIT
    async with reader.read(request(large)), reader.read(request(large)):
        async with reader.read(request(large)), reader.read(request(large)):
            with pytest.raises(Overloaded):
                await read(reader, large)
            assert await read(reader, CHUNK) == CHUNK
        assert await read(reader, large) == large


async def test_a_refused_body_leaves_nothing_behind() -> None:
    reader = BodyReader(LIMIT)
    for _ in range(10):
        with pytest.raises(PayloadTooLarge):
            await read(reader, b"x" * (LIMIT + 1))
    assert await read(reader, b"x" * LIMIT)
