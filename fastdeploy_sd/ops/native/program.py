"""A sequence of op calls that the kernel library keeps and runs as one. Knows params structs, not what the ops mean."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fastdeploy_sd.ops.library import CParams, call, library
from fastdeploy_sd.ops.native.standing_call import StandingCall
from fastdeploy_sd.types import I64


class ProgramCallParams(CParams):
    """Twin of fdsd::ProgramCall."""

    _fields_ = (("op", ctypes.c_char_p), ("params", ctypes.c_void_p), ("num_bytes", ctypes.c_int32))


class ProgramPatchParams(CParams):
    """Twin of fdsd::ProgramPatch."""

    _fields_ = (
        ("call", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("num_bytes", ctypes.c_int32),
        ("symbol", ctypes.c_int32),
    )


class ProgramCreateParams(CParams):
    """Twin of fdsd::ProgramCreateParams."""

    _fields_ = (
        ("num_calls", ctypes.c_int32),
        ("num_patches", ctypes.c_int32),
        ("num_symbols", ctypes.c_int32),
        ("calls", ctypes.c_void_p),
        ("patches", ctypes.c_void_p),
        ("program", ctypes.c_void_p),
    )


class ProgramRunParams(CParams):
    """Twin of fdsd::ProgramRunParams."""

    _fields_ = (
        ("program", ctypes.c_void_p),
        ("num_symbols", ctypes.c_int32),
        ("symbols", ctypes.c_void_p),
        ("nanoseconds", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Patch:
    """A field of a call that gets the value of a symbol before every run.

    Attributes:
        offset: of the field in the params struct, in bytes.
        num_bytes: 4 for a count, 8 for an address or a 64-bit count.
    """

    call: int
    offset: int
    num_bytes: int
    symbol: int


class NativeProgram:
    """Calls with their params, and the fields that differ from run to run.

    Args:
        calls: name of each op and its params, copied.

    Raises:
        ValueError: an unknown op, params of another op, a patch outside the params or without a symbol, two patches of
            the same bytes, or memory is exhausted.
    """

    def __init__(self, calls: Sequence[tuple[str, CParams]], patches: Sequence[Patch], num_symbols: int) -> None:
        _check_disjoint(patches)
        records = (ProgramCallParams * len(calls))(
            *(ProgramCallParams(op.encode(), ctypes.addressof(p), ctypes.sizeof(p)) for op, p in calls)
        )
        fields = (ProgramPatchParams * len(patches))(
            *(ProgramPatchParams(p.call, p.offset, p.num_bytes, p.symbol) for p in patches)
        )
        handle = ctypes.c_void_p()
        where = (ctypes.addressof(records), ctypes.addressof(fields), ctypes.addressof(handle))
        call("program_create", ProgramCreateParams(len(calls), len(patches), num_symbols, *where))
        self.num_calls, self.num_symbols = len(calls), num_symbols
        self._handle = handle
        self._run = StandingCall("program_run", ProgramRunParams(handle, num_symbols, None, None))
        weakref.finalize(self, library().fdsd_program_destroy, handle)

    def run(self, symbols: I64) -> None:
        """Run every call in order.

        Args:
            symbols: i64[num_symbols], counts and addresses.

        Raises:
            ValueError: wrong number or range of symbols, or an op refused its arguments; the text names call and op.
        """
        self._run.bind("symbols", symbols, (self.num_symbols,), np.int64)
        self._run.bind("nanoseconds", None, (), np.int64)
        self._run.run()

    def timed_run(self, symbols: I64) -> I64:
        """Run as `run` and return i64[num_calls], the nanoseconds of each call."""
        nanoseconds = np.zeros(self.num_calls, np.int64)
        self._run.bind("symbols", symbols, (self.num_symbols,), np.int64)
        self._run.bind("nanoseconds", nanoseconds, (self.num_calls,), np.int64)
        self._run.run()
        return nanoseconds


def _check_disjoint(patches: Sequence[Patch]) -> None:
    """Raise ValueError where two patches write the same bytes: the field would depend on which symbol changed last."""
    in_order = sorted(patches, key=lambda patch: (patch.call, patch.offset))
    for first, second in pairwise(in_order):
        if first.call == second.call and second.offset < first.offset + first.num_bytes:
            raise ValueError(
                f"patches: expected one per field, got two for byte {second.offset} of the params of call {second.call}"
            )
