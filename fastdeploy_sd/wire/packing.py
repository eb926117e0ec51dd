"""Values of our own types <-> bytes, for pipes between a process and the children it trusts. Knows no message."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import msgpack  # type: ignore[import-untyped]

from fastdeploy_sd.wire.codec import ProtocolError, codec_of

T = TypeVar("T")


def pack(value: Any) -> bytes:
    """Return the wire form of a dataclass.

    Raises:
        ProtocolError: a value has no wire form.
    """
    hint: Any = type(value)
    encode = codec_of(hint).encode
    assert encode is not None, "dataclass codecs always encode"
    try:
        return cast(bytes, msgpack.packb(encode(value)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{type(value).__name__}: cannot be sent: {error}") from None


def unpack(cls: type[T], frame: bytes) -> T:
    """Return the dataclass that `pack` was given.

    Raises:
        ProtocolError: the frame holds something else.
    """
    hint: Any = cls
    try:
        values: Any = msgpack.unpackb(frame, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{cls.__name__}: not msgpack: {error}") from None
    return cast(T, codec_of(hint).decode(values))
