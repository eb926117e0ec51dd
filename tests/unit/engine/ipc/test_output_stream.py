"""A reader with a backlog takes turns with the other tasks of its process."""

from __future__ import annotations

import asyncio

from fastdeploy_sd.engine.ipc.output_stream import OutputStream
from fastdeploy_sd.types import RequestOutput


async def test_others_have_a_turn_between_two_outputs_that_are_there() -> None:
    streams, turns = [OutputStream(f"r{i}") for i in range(3)], list[str]()
    for stream in streams:
        for _ in range(100):
            stream.put(RequestOutput(stream.request_id, (1,)), is_last=False)

    async def read(stream: OutputStream) -> None:
        for _ in range(100):
            await stream.next()
            turns.append(stream.request_id)

    async def others() -> None:
        while len(turns) - turns.count("other") < 300:
            turns.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(others(), *map(read, streams))
    assert turns.count("other") > 80
    between = "".join("." if turn == "other" else "x" for turn in turns).split(".")
    assert max(map(len, between)) <= len(streams), "work of more than one output a stream in one go"
