"""Instances that know the secret and say whatever a test has them say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from fastdeploy_sd.device.checksum import chunk_checksums
from fastdeploy_sd.disaggregation.transfer import messages as m
from fastdeploy_sd.disaggregation.transfer.pages import Bytes
from fastdeploy_sd.wire.sockets import Connection, CurveKeys, Hub, Listener
from tests.splitwise.instances import DEADLINE_S, LAYERS, content, describe, settings

MAX_FRAME_BYTES = 1 << 20
T = TypeVar("T")


def _hub() -> Hub:
    known = settings("decode")
    return Hub(CurveKeys.of(known.server_key, known.client_key))


class RawDecode:
    """A decode instance on one connection."""

    def __init__(self, address: str) -> None:
        self._hub = _hub()
        self._link = Connection(self._hub, address, MAX_FRAME_BYTES, 1000)

    def say(self, *messages: m.FromDecode | bytes) -> None:
        for message in messages:
            assert self._link.send(message if isinstance(message, bytes) else m.encode(message))

    def hear(self, kind: type[T]) -> tuple[T, list[Bytes]]:
        """Return the next message of this kind, and its pages; others before it are dropped."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            self._hub.wait(0.1)
            for parts in self._link.receive():
                message = m.decode_from_prefill(bytes(parts[0]))
                if isinstance(message, kind):
                    return message, [np.frombuffer(part, np.uint8) for part in parts[1:]]
        raise AssertionError(f"expected {kind.__name__}")

    def is_lost(self) -> bool:
        self._hub.wait(0.01)
        return self._link.loss() is not None

    def open(self, num_slots: int = 10) -> None:
        """Agree on tcp with a window of so many pages."""
        self.say(m.PeerHello("raw", describe(), ("tcp",)))
        self.hear(m.Welcome)
        self.say(m.Open("tcp", (m.Receiver(num_slots, max(LAYERS)),)))
        self.hear(m.Opened)

    def close(self) -> None:
        self._link.close()
        self._hub.close()


class RawPrefill:
    """A prefill instance that takes one decode instance."""

    def __init__(self) -> None:
        self._hub = _hub()
        self._listener = Listener(self._hub, "127.0.0.1", 0, MAX_FRAME_BYTES, 1000)
        self.address = self._listener.address
        self._identity = b""

    def say(self, message: m.FromPrefill | bytes, payloads: Sequence[Bytes] = ()) -> None:
        frame = message if isinstance(message, bytes) else m.encode(message)
        self._listener.send(self._identity, frame, [bytearray(page.tobytes()) for page in payloads])

    def hear(self, kind: type[T], meanwhile: Callable[[], object] = lambda: None) -> T:
        """Return the next message of this kind; others before it are dropped."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            self._hub.wait(0.05)
            meanwhile()
            for identity, frame in self._listener.receive():
                self._identity = identity
                message = m.decode_from_decode(frame)
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"expected {kind.__name__}")

    def open(self) -> m.Fetch:
        """Agree on tcp with a decode instance that has ordered something, and return its order."""
        self.hear(m.PeerHello)
        self.say(m.Welcome("raw", describe(), ("tcp",), ""))
        self.hear(m.Open)
        self.say(m.Opened())
        return self.hear(m.Fetch)

    def send_page(self, transfer_id: str, prompt: int, layer: int, block: int, page: Bytes | None = None) -> None:
        """Send a page with a checksum of what it should be."""
        right = content(prompt, layer, block, LAYERS[layer % len(LAYERS)])
        checksum = int(chunk_checksums(right, right.nbytes)[0])
        self.say(m.Chunks(transfer_id, 0, layer, (block,), (0,), (checksum,)), [right if page is None else page])

    def close(self) -> None:
        self._listener.close()
        self._hub.close()
