"""Versioned frames of typed messages, as they are or signed. Knows no message and no socket."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import typing
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]

from fastdeploy_sd.errors import shown
from fastdeploy_sd.wire.codec import ProtocolError, decode_values, pack_values, unpack_values

T = TypeVar("T")

NUM_MAC_BYTES = hashlib.sha256().digest_size
_MAX_INTEGER_BYTES = 9


class Protocol:
    """The messages of one wire, in unions of types, usually one per direction; a type may be in several.

    A frame is a version byte and the msgpack list `[tag, fields...]`. The tag is a message's place in the protocol, so
    any change of the messages needs another version.
    """

    def __init__(self, version: int, *unions: Any) -> None:
        members = (cls for union in unions for cls in typing.get_args(union) or (union,))
        self.version = version
        self._version_byte = bytes([version])
        self._types: dict[int, type[Any]] = dict(enumerate(dict.fromkeys(members), start=1))
        self._tags = {cls: tag for tag, cls in self._types.items()}

    def encode(self, message: Any) -> bytes:
        """Message -> frame; ProtocolError: a value has no wire form (an integer beyond 64 bits, a NumPy scalar in place
        of an int).
        """
        cls = type(message)
        return self._version_byte + pack_values(cls, message, self._tags[cls])

    def decode(self, frame: bytes | memoryview, types: tuple[type[Any], ...] = ()) -> Any:
        """Frame -> message, one of `types` or any; raises nothing but ProtocolError, also for another version."""
        version = bytes(frame[:1])
        if version != self._version_byte:
            raise ProtocolError(f"frame: expected version {self.version}, got {version.hex() or 'an empty frame'}")
        values = unpack_values(memoryview(frame)[1:], "frame")
        tag = values[0] if isinstance(values, list) and values else None
        cls = self._types.get(tag) if type(tag) is int else None
        if cls is None or (types and cls not in types):
            raise ProtocolError(f"frame: expected a list that starts with a known message tag, got {shown(values)}")
        return decode_values(cls, values[1:])

    def decoder(self, union: Any) -> Callable[[bytes], Any]:
        """Return `decode` for the messages of one direction."""
        return partial(self.decode, types=typing.get_args(union))

    def first_integer(self, frame: bytes, cls: type[Any]) -> int | None:
        """Return the first field of a frame of one type without reading the others; None for any other frame."""
        num_values = 1 + len(dataclasses.fields(cls))
        start = self._version_byte + bytes([0x90 + num_values, self._tags[cls]])  # msgpack of a list and its first item
        if frame[: len(start)] != start:
            return None
        unpacker = msgpack.Unpacker()
        unpacker.feed(frame[len(start) : len(start) + _MAX_INTEGER_BYTES])
        try:
            value = unpacker.unpack()
        except (ValueError, TypeError, msgpack.UnpackException):
            return None
        return value if type(value) is int else None


def mac(key: bytes, purpose: str, content: bytes) -> bytes:
    """Return the HMAC-SHA256 of `content`; one for another purpose is another one."""
    return hmac.digest(key, purpose.encode() + b"\0" + content, hashlib.sha256)


class SignedCodec:
    """Frames of a protocol that prove who wrote them and where they belong: an HMAC-SHA256 before the frame.

    Frames of another `scope` are refused, and longer ones than `max_bytes` unread.
    """

    def __init__(self, protocol: Protocol, key: bytes, scope: str, max_bytes: int) -> None:
        self._protocol, self._key, self._scope, self._max_bytes = protocol, key, scope, max_bytes

    def encode(self, place: str, message: Any) -> bytes:
        """Return the signed frame of a message, which counts at one place; ProtocolError: a value has no wire form, or
        the frame would be too long.
        """
        frame = self._protocol.encode(message)
        size = NUM_MAC_BYTES + len(frame)
        if size > self._max_bytes:
            raise ProtocolError(f"{type(message).__name__}: expected at most {self._max_bytes} bytes, got {size}")
        return mac(self._key, f"{self._scope}\0{place}", frame) + frame

    def decode(self, place: str, cls: type[T], signed: bytes) -> T:
        """Return the message of a signed frame that was found at a place; raises SignatureError or ProtocolError."""
        if len(signed) > self._max_bytes:
            raise ProtocolError(f"{place}: expected a frame of at most {self._max_bytes} bytes, got {len(signed)}")
        signature, frame = signed[:NUM_MAC_BYTES], signed[NUM_MAC_BYTES:]
        if not hmac.compare_digest(mac(self._key, f"{self._scope}\0{place}", frame), signature):
            raise SignatureError(f"{place}: expected the signature of this deployment's secret, got another one")
        return typing.cast(T, self._protocol.decode(frame, (cls,)))


class SignatureError(ProtocolError):
    """A frame was signed with another key, for another place, or not at all."""
