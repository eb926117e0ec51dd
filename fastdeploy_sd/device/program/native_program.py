"""A sequence of op calls that the kernel library keeps and runs as one. Knows params structs, not what the ops mean."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fastdeploy_sd.device.arrays import address
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import BoundCall, CParams, call, library
from fastdeploy_sd.types import I64


@dataclass(frozen=True, slots=True)
class Patch:
    """A field of a call, at an offset in bytes, that gets the value of a symbol before every run.

    A count has 4 bytes, an address or a 64-bit count 8.
    """

    call: int
    offset: int
    num_bytes: int
    symbol: int


@dataclass(frozen=True, slots=True)
class Count:
    """A symbol that a call computes, at an i32's address; see ProgramCount in custom_ops/include/fdsd/program.h."""

    call: int
    symbol: int
    value: int


class NativeProgram:
    """Calls with their params, and the fields that differ from run to run: `symbols` i64[n], written before a run.

    Raises ValueError: an unknown op, params of another op, a patch outside the params or without a symbol, two patches
    of the same bytes, a count without a call or symbol, two counts of a call, or memory is exhausted.
    """

    def __init__(
        self,
        calls: Sequence[tuple[str, CParams]],
        patches: Sequence[Patch],
        num_symbols: int,
        counts: Sequence[Count] = (),
    ) -> None:
        create = create_params(calls, patches, num_symbols, counts)
        handle = ctypes.c_void_p()
        create.program = ctypes.addressof(handle)
        call("program_create", create)
        self.symbols: I64 = np.zeros(num_symbols, np.int64)
        self._nanoseconds: I64 = np.zeros(len(calls), np.int64)
        run: dict[str, Any] = {"program": handle, "num_symbols": num_symbols, "symbols": address(self.symbols)}
        self._run = BoundCall("program_run", struct_type("ProgramRunParams")(**run))
        run["nanoseconds"] = address(self._nanoseconds)
        self._timed_run = BoundCall("program_run", struct_type("ProgramRunParams")(**run))
        weakref.finalize(self, library().fdsd_program_destroy, handle)

    def run(self) -> None:
        """Run every call in order, with what `symbols` says.

        Raises ValueError: a symbol is out of range, an op refused its arguments, or computed a count that is no smaller
        number than the symbol was; the text names call and op.
        """
        self._run.run()

    def timed_run(self) -> I64:
        """Run as `run` and return i64[num_calls], the nanoseconds of each call; 0 where it did not run."""
        self._timed_run.run()
        return self._nanoseconds.copy()


def create_params(
    calls: Sequence[tuple[str, CParams]], patches: Sequence[Patch], num_symbols: int, counts: Sequence[Count] = ()
) -> Any:
    """Return the params that make a program, but for where it goes; arguments as NativeProgram's."""
    _check_disjoint(patches)
    call_type: type[Any] = struct_type("ProgramCall")
    patch_type: type[Any] = struct_type("ProgramPatch")
    count_type: type[Any] = struct_type("ProgramCount")
    records = (call_type * len(calls))(
        *(call_type(op=op.encode(), params=ctypes.addressof(p), num_bytes=ctypes.sizeof(p)) for op, p in calls)
    )
    fields = (patch_type * len(patches))(*(patch_type(**asdict(patch)) for patch in patches))
    computed = (count_type * len(counts))(*(count_type(**asdict(count)) for count in counts))
    create: Any = struct_type("ProgramCreateParams")(
        num_calls=len(calls),
        num_patches=len(patches),
        num_counts=len(counts),
        num_symbols=num_symbols,
        calls=ctypes.addressof(records),
        patches=ctypes.addressof(fields),
        counts=ctypes.addressof(computed),
    )
    create.kept = (calls, records, fields, computed)
    return create


def _check_disjoint(patches: Sequence[Patch]) -> None:
    """Raise ValueError where two patches write the same bytes: the field would depend on which symbol changed last."""
    in_order = sorted(patches, key=lambda patch: (patch.call, patch.offset))
    for first, second in pairwise(in_order):
        if first.call == second.call and second.offset < first.offset + first.num_bytes:
            raise ValueError(
                f"patches: expected one per field, got two for byte {second.offset} of the params of call {second.call}"
            )
