"""The structs of custom_ops/include/fdsd as the kernel library lays them out, and ctypes structs made from that.

The library says where each field lies and what it is, so Python code spells no struct a second time. Knows no op.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy_sd.device.library import CParams, library
from fastdeploy_sd.errors import ConfigError

_C_TYPES: Mapping[str, Any] = {
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "const char*": ctypes.c_char_p,  # takes bytes, and keeps them alive
}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a struct, or of a struct in it: `eps`, `cache.k`.

    Its type is int32, int64, uint64, float32 or float64, or a pointer, as `const float32*`; the offset is in bytes.
    """

    path: str
    offset: int
    type: str

    @property
    def is_pointer(self) -> bool:
        return self.type.endswith("*")


@dataclass(frozen=True, slots=True)
class Layout:
    """A struct of the library: its size, and its fields by name.

    A name is the last part of the path where no other field ends with it, else the path joined with `_`.
    """

    num_bytes: int
    fields: Mapping[str, Field]


@functools.cache
def layout(struct: str) -> Layout:
    """Return how the library lays out a struct of its headers. Raises ConfigError: the library knows no such struct."""
    return read_layout(library(), struct)


def read_layout(library: ctypes.CDLL, struct: str) -> Layout:
    """As `layout`, of a given library."""
    function = library.fdsd_struct_layout
    function.restype = ctypes.c_char_p
    text = function(struct.encode())
    if text is None:
        raise ConfigError(f"kernel library: expected struct {struct}, got none; run `scripts/dev build`")
    whole, *lines = [line.split(" ", 2) for line in text.decode().splitlines()]
    fields = [Field(path, int(offset), kind) for path, offset, kind in lines]
    count = Counter(field.path.rsplit(".", 1)[-1] for field in fields)
    by_name = {}
    for field in fields:
        leaf = field.path.rsplit(".", 1)[-1]
        by_name[leaf if count[leaf] == 1 else field.path.replace(".", "_")] = field
    return Layout(int(whole[1]), by_name)


@functools.cache
def struct_type(struct: str) -> type[CParams]:
    """Return a ctypes struct with the fields of a struct of the library, by their names in its Layout.

    Raises ConfigError: the library knows no such struct, or ctypes does not know the type of a field.
    """
    found = layout(struct)
    members: list[tuple[str, Any]] = []
    end = 0
    for name, field in found.fields.items():
        kind = _C_TYPES.get(field.type, ctypes.c_void_p if field.is_pointer else None)
        if kind is None:
            raise ConfigError(f"{struct}.{field.path}: expected a number or a pointer, got {field.type}")
        # Structs in the struct may end with padding that a flat one would not have.
        if field.offset - end >= ctypes.alignment(kind):
            members.append((f"_pad{end}", ctypes.c_char * (field.offset - end)))
        members.append((name, kind))
        end = field.offset + ctypes.sizeof(kind)
    made = type(struct, (CParams,), {"_fields_": tuple(members), "__slots__": ()})
    assert ctypes.sizeof(made) == found.num_bytes, f"{struct}: {ctypes.sizeof(made)} bytes, {found.num_bytes} in C++"
    assert all(getattr(made, name).offset == field.offset for name, field in found.fields.items()), struct
    return made
