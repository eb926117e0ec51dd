"""all_reduce and all_gather: what ranks do together inside a pass."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.device.communicator import Communicator
from fastdeploy_sd.device.cuda.communicator import GpuCommunicator
from fastdeploy_sd.device.device_tensor import dtype_name
from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, Attr, DTypeOf, In, Out
from fastdeploy_sd.device.program.op import A, Op

AnyCommunicator = Communicator | GpuCommunicator

ALL_REDUCE = Op(
    "all_reduce",
    "num_rows",
    communicator=Attr(int),
    y_dtype=Attr(ACTIVATIONS),
    x=In(F32, "num_rows, num_columns"),
    bias=In(F32, "num_columns", optional=True),
    shared=In("y_dtype", "num_rows, num_columns", optional=True),
    y=Out("y_dtype", "num_rows, num_columns"),
)
ALL_GATHER = Op(
    "all_gather",
    "num_rows",
    communicator=Attr(int),
    num_columns=Attr(int),
    unit=Attr(int),
    x=In(ACTIVATIONS, "num_rows, num_own"),
    dtype=DTypeOf("x"),
    y=Out("x", "num_rows, num_columns"),
)


def all_reduce(
    x: A, communicator: AnyCommunicator | None, out_dtype: Any, bias: A | None = None, shared: A | None = None
) -> A:
    """y = the sum of the ranks' x f32[T, H] (+ bias) (+ shared), rounded once; the same on every rank.

    The ranks' values are added in float32 as a binary tree: r0 + r1, or (r0 + r1) + (r2 + r3). Where each x is the sum
    of a rank's slices, y is what one rank with all slices computes, bit for bit. `bias` f32[H] and `shared` [T, H], of
    y's dtype, are the same on every rank.

    Raises ValueError: another rank has failed or does not come; see Communicator.
    """
    y: A = ALL_REDUCE(x=x, bias=bias, shared=shared, communicator=_handle(communicator), y_dtype=dtype_name(out_dtype))
    return y


def all_gather(x: A, communicator: AnyCommunicator | None, num_columns: int, unit: int = 1) -> A:
    """Put the ranks' columns side by side: a rank's x is its range of 0..num_columns, halved at multiples of `unit`.

    Raises ValueError: another rank has failed or does not come; see Communicator.
    """
    y: A = ALL_GATHER(x=x, communicator=_handle(communicator), num_columns=num_columns, unit=unit)
    return y


def _handle(communicator: AnyCommunicator | None) -> int:
    return 0 if communicator is None else communicator.handle
