"""Pieces of an answer that are written together are sent together, in order, and none is lost at the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fastdeploy_sd.wire.http.connection import GatheredWrites


class Noted:
    """A transport that notes what it is told to send."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.sent.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> str:
        return f"the transport's {name}"


@pytest.fixture
async def pair() -> tuple[Noted, GatheredWrites]:
    noted = Noted()
    transport: Any = noted
    return noted, GatheredWrites(transport, asyncio.get_running_loop())


async def test_a_turn_is_one_piece(pair: tuple[Noted, GatheredWrites]) -> None:
    noted, writes = pair
    for turn in (b"abc", b"de"):
        for i in turn:
            writes.write(bytes([i]))
            writes.write(b"")
        await asyncio.sleep(0)
    assert noted.sent == [b"abc", b"de"]
    assert writes.get_extra_info("peername") == "the transport's peername"


async def test_closing_sends_what_is_left_and_nothing_after(pair: tuple[Noted, GatheredWrites]) -> None:
    noted, writes = pair
    writes.write(b"last")
    writes.close()
    writes.write(b"too late")
    await asyncio.sleep(0)
    assert (noted.sent, noted.is_closed) == ([b"last"], True)
