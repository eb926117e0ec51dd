"""Dataclasses <-> msgpack, both ways derived from the type hints and checked on arrival.

A dataclass travels as the list of its field values in declaration order, an array as its little-endian bytes. Nothing
is guessed on decoding: another number of fields, another type or a value its own constructor refuses is a
ProtocolError. Knows no message and no socket.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgpack  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from fastdeploy_sd.errors import FdsdError, InternalError, shown

Convert = Callable[[Any], Any]
T = TypeVar("T")


class ProtocolError(InternalError):
    """A frame or a value does not have the form that both sides agreed on."""


def pack(value: Any) -> bytes:
    """Return the bytes of a dataclass; ProtocolError: a value has no wire form."""
    return pack_values(type(value), value)


def unpack(cls: type[T], frame: bytes) -> T:
    """Return the dataclass that `pack` was given; ProtocolError: the frame holds something else."""
    return decode_values(cls, unpack_values(frame, cls.__name__))


def pack_values(cls: type[Any], value: Any, *before: int) -> bytes:
    """Return the bytes of a dataclass, with integers before its fields; ProtocolError: a value has no wire form."""
    hint: Any = cls
    encode = codec_of(hint).encode
    assert encode is not None, "dataclass codecs always encode"
    try:
        return cast(bytes, msgpack.packb([*before, *encode(value)]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{cls.__name__}: cannot be sent: {error}") from None


def decode_values(cls: type[T], values: Any) -> T:
    """Return the dataclass of what msgpack found; ProtocolError: it is none."""
    hint: Any = cls
    return cast(T, codec_of(hint).decode(values))


def unpack_values(frame: bytes | memoryview, name: str) -> Any:
    """Return what msgpack finds in the bytes of `name`; ProtocolError: they are no msgpack."""
    try:
        return msgpack.unpackb(frame, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{name}: not msgpack: {error}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """How values of one type travel; without `encode` they are packed as they are. `decode` raises ProtocolError."""

    encode: Convert | None
    decode: Convert


@functools.cache
def codec_of(hint: Any) -> Codec:
    """Build the codec of a type hint; once per type, so that the work per value is calls of ready closures.

    Understands bool, int, float, str, string enums, dataclasses, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`,
    `Mapping[K, V]`, `dict[K, V]`, `NDArray[dtype]`. Raises TypeError: the hint is of another kind (a mistake in our own
    dataclasses, found on first use).
    """
    if hint in _SCALARS:
        return Codec(None, functools.partial(_decode_scalar, hint))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_codec(hint)
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return Codec(None, functools.partial(_decode_enum, hint))
    return _generic_codec(hint)


# What a scalar hint accepts: an int is a valid float, a bool is never a number.
_SCALARS: dict[type, tuple[type, ...]] = {
    bool: (bool,), int: (int,), float: (float, int), str: (str,), bytes: (bytes,)
}  # fmt: skip


def _generic_codec(hint: Any) -> Codec:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [arg for arg in args if arg is not types.NoneType]
        if len(inner) == 1:
            return _optional_codec(codec_of(inner[0]))
    if origin is tuple:
        return _sequence_codec(codec_of(args[0])) if args[-1] is Ellipsis else _tuple_codec(args)
    if origin in (Mapping, dict):
        return _mapping_codec(codec_of(args[0]), codec_of(args[1]))
    if origin is np.ndarray:
        return _array_codec(np.dtype(typing.get_args(args[1])[0]))
    if origin is npt.NDArray:  # an alias by itself since NumPy 2.5
        return _array_codec(np.dtype(args[0]))
    raise TypeError(f"no wire form for {hint!r}")


def _decode_scalar(hint: type, value: Any) -> Any:
    if type(value) not in _SCALARS[hint]:
        raise _unexpected(f"a value of type {hint.__name__}", value)
    return value


def _decode_enum(hint: type[enum.StrEnum], value: Any) -> enum.StrEnum:
    try:
        return hint(value)
    except ValueError:
        raise _unexpected(f"one of {', '.join(hint)}", value) from None


def _optional_codec(inner: Codec) -> Codec:
    def decode(value: Any) -> Any:
        return None if value is None else inner.decode(value)

    if inner.encode is None:
        return Codec(None, decode)
    encode_inner = inner.encode
    return Codec(lambda value: None if value is None else encode_inner(value), decode)


def _sequence_codec(item: Codec) -> Codec:
    def decode(value: Any) -> tuple[Any, ...]:
        return tuple(map(item.decode, _expect_list(value)))

    if item.encode is None:
        return Codec(None, decode)
    encode_item = item.encode
    return Codec(lambda value: [encode_item(x) for x in value], decode)


def _tuple_codec(hints: tuple[Any, ...]) -> Codec:
    items = [codec_of(hint) for hint in hints]
    encoders = [c.encode or _identity for c in items]

    def decode(value: Any) -> tuple[Any, ...]:
        if len(_expect_list(value)) != len(items):
            raise _unexpected(f"a list of {len(items)}", value)
        return tuple(c.decode(x) for c, x in zip(items, value, strict=True))

    if all(c.encode is None for c in items):
        return Codec(None, decode)
    return Codec(lambda value: [e(x) for e, x in zip(encoders, value, strict=True)], decode)


def _mapping_codec(key: Codec, item: Codec) -> Codec:
    encode_key, encode_item = key.encode or _identity, item.encode or _identity

    def decode(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _unexpected("a map", value)
        return {key.decode(k): item.decode(v) for k, v in value.items()}

    return Codec(lambda value: {encode_key(k): encode_item(v) for k, v in value.items()}, decode)


def _array_codec(dtype: np.dtype[Any]) -> Codec:
    wire_dtype = dtype.newbyteorder("<")

    def encode(value: Any) -> bytes:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            raise _unexpected(f"{dtype.name}[n]", value)
        return value.astype(wire_dtype, copy=False).tobytes()

    def decode(value: Any) -> np.ndarray[Any, Any]:
        if not isinstance(value, bytes) or len(value) % dtype.itemsize:
            raise _unexpected(f"the bytes of {dtype.name}[n]", value)
        return np.frombuffer(value, wire_dtype).astype(dtype, copy=False)

    return Codec(encode, decode)


def _dataclass_codec(cls: type[Any]) -> Codec:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    codecs = [codec_of(hints[name]) for name in names]
    converted = [(i, c.encode) for i, c in enumerate(codecs) if c.encode is not None]
    get_values = _values_getter(names)

    def encode(value: Any) -> list[Any]:
        values = list(get_values(value))
        for i, encode_field in converted:
            values[i] = encode_field(values[i])
        return values

    def decode(value: Any) -> Any:
        if len(_expect_list(value)) != len(names):
            raise _unexpected(f"the {len(names)} fields of {cls.__name__}", value)
        name = ""
        try:
            fields = {}
            for name, codec, item in zip(names, codecs, value, strict=True):
                fields[name] = codec.decode(item)
            name = "value"
            return cls(**fields)
        except ProtocolError as error:
            raise ProtocolError(f"{cls.__name__}.{name}: {error.message}") from None
        except (FdsdError, ValueError, TypeError) as error:  # refused by the constructor
            raise ProtocolError(f"{cls.__name__}: {error}") from None

    return Codec(encode, decode)


def _values_getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _identity(value: Any) -> Any:
    return value


def _expect_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _unexpected("a list", value)
    return value


def _unexpected(wanted: str, value: Any) -> ProtocolError:
    return ProtocolError(f"expected {wanted}, got {shown(value)}")
