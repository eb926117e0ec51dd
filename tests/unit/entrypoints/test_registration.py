"""A server is registered when it answers, not as soon as its socket takes connections."""

from __future__ import annotations

import asyncio
import socket

from fastdeploy_sd.entrypoints.registration import wait_answering


async def test_it_waits_until_an_accepted_connection_is_answered() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /live ")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    with socket.create_server(("0.0.0.0", 0)) as listener:
        waiting = asyncio.create_task(wait_answering(listener))
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done()
        server = await asyncio.start_server(answer, sock=listener)
        try:
            await asyncio.wait_for(waiting, 30)
        finally:
            server.close()
