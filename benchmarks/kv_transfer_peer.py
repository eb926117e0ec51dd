"""The other process of `bench kv-transfer`: a prefill instance whose pages are there already, and a plain TCP sender.

Reads its orders, one line of JSON, from standard input; prints its two addresses; ends when its input does.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_sd.disaggregation.transfer.connector import KvConnector
from fastdeploy_sd.disaggregation.transfer.events import PrefillWanted
from fastdeploy_sd.disaggregation.transfer.pages import Bytes
from fastdeploy_sd.disaggregation.transfer.settings import ConnectorSettings
from fastdeploy_sd.types import KvDescription

BLOCK_SIZE = 64
# A page is its keys and its values.
_PIECES = 2


class MemoryPages:
    """Pages of one size in one array [layers, blocks, bytes]."""

    def __init__(self, num_layers: int, num_blocks: int, page_bytes: int, fill: int) -> None:
        self.num_layers = num_layers
        self.memory = np.full((num_layers, num_blocks, page_bytes), fill, np.uint8)

    @property
    def port(self) -> None:
        """See Pages: they are in the host's memory."""

    def page_bytes(self, layer: int) -> int:
        """See Pages."""
        return int(self.memory.shape[2])

    def read_all(self, layer: int, block_ids: Sequence[int]) -> Sequence[tuple[Bytes, ...]]:
        """See Pages."""
        return [tuple(np.split(self.memory[layer, block_id], _PIECES)) for block_id in block_ids]

    def awaited(self, _layer: int) -> None:
        """See Pages: nothing."""

    def write(self, layer: int, block_id: int, data: memoryview) -> None:
        """See Pages."""
        self.memory[layer, block_id] = np.frombuffer(data, np.uint8)

    def follow_steps(self) -> None:
        """See Pages: there are none."""

    def end_writes(self) -> None:
        """See Pages: all is in its place."""


def description(num_layers: int, page_bytes: int) -> KvDescription:
    """Return what both processes say of their pages."""
    return KvDescription("CPU", "bench", BLOCK_SIZE, "bytes", num_layers, 1, 1, (page_bytes,) * num_layers)


def settings(role: str, protocols: Sequence[str], key: str) -> ConnectorSettings:
    """Return the settings of an instance that is reached over loopback; key: 32 hexadecimal digits."""
    return ConnectorSettings(
        role=role,
        host="127.0.0.1",
        port=0,
        protocols=tuple(protocols),
        server_key=f"s{key[1:]}".encode(),
        client_key=f"c{key[1:]}".encode(),
    )


def serve(order: dict[str, Any]) -> None:
    """Send what is asked for until standard input ends."""
    layers, blocks, size = order["layers"], order["blocks"], order["page_bytes"]
    pages = MemoryPages(layers, blocks, size, 1)
    connector = KvConnector(settings("prefill", order["protocols"], order["key"]), description(layers, size), pages)
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send_plainly, args=(plain, pages), daemon=True).start()
    print(json.dumps({"address": connector.address, "port": plain.getsockname()[1]}), flush=True)
    while sys.stdin not in select.select([connector.fd, sys.stdin], [], [])[0]:
        for event in connector.take_events():
            if isinstance(event, PrefillWanted):
                for layer in range(layers):
                    connector.send(event.transfer_id, layer, 0, range(blocks))
                connector.finish(event.transfer_id, ())
    connector.close()


def _send_plainly(listener: socket.socket, pages: MemoryPages) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(pages.memory.data)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    serve(json.loads(sys.stdin.readline()))
