"""The two ends of a channel in one process: what arrives is noticed whenever it arrives."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path

from fastdeploy_sd.wire.channel import ClientChannel, ServerChannel, private_address, remove_directory

WAIT_S = 120.0


def received(server: ServerChannel, count: int) -> list[tuple[bytes, bytes]]:
    """Wait for that many frames."""
    frames: list[tuple[bytes, bytes]] = []
    while len(frames) < count:
        server.wait(timeout_s=WAIT_S)
        frames += server.receive()
    return frames


async def test_frames_that_arrive_before_a_send_are_not_lost() -> None:
    """Sending makes the descriptor unreadable again, so the sender has to tell the waiting reader."""
    with private_address() as address:
        server, client = ServerChannel(address), ClientChannel(address)
        client.send(b"hello")
        [(identity, _)] = received(server, 1)
        for _ in range(20):
            waiting = asyncio.create_task(client.receive())
            await asyncio.sleep(0)
            for frame in (b"1", b"2", b"3"):
                server.send(identity, frame)
            time.sleep(0.01)  # they arrive while the event loop does not look
            client.send(b"something")
            async with asyncio.timeout(WAIT_S):
                assert [await waiting, await client.receive(), await client.receive()] == [b"1", b"2", b"3"]
        client.close(linger_s=0)
        server.close(linger_s=0)


async def test_a_cancelled_reader_loses_no_frame() -> None:
    with private_address() as address:
        server, client = ServerChannel(address), ClientChannel(address)
        client.send(b"hello")
        [(identity, _)] = received(server, 1)
        waiting = asyncio.create_task(client.receive())
        await asyncio.sleep(0)
        server.send(identity, b"1")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(WAIT_S):
            assert await client.receive() == b"1"
        client.close(linger_s=0)
        server.close(linger_s=0)


def test_a_directory_goes_away_while_files_are_written_there(tmp_path: Path) -> None:
    """HTTP processes of a killed launcher do so until they have ended, too."""
    directory = tmp_path / "fdsd-x"
    directory.mkdir()

    is_over = threading.Event()

    def write(name: str) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            with contextlib.suppress(FileNotFoundError):
                (directory / f"{name}-{number % 1000}").write_bytes(b"")

    threads = [threading.Thread(target=write, args=(f"counts-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    while len(list(directory.iterdir())) < 100:
        pass
    remove_directory(str(directory))
    is_over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert list(tmp_path.iterdir()) == []
