"""Packs weight matrices on a GPU, into the bytes that `pack_into` makes, through pinned memory.

A piece is whole panels of a matrix: their rows as the checkpoint stores them. Knows no framework.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from fastdeploy_sd.device.cuda.device import CudaDevice
from fastdeploy_sd.device.cuda.uploads import CudaUploads
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.ops.group_format import GROUP_FORMATS, UNIT
from fastdeploy_sd.ops.group_packing import I8, StoredMatrix, pack_integers_params
from fastdeploy_sd.ops.linear_format import LinearFormat
from fastdeploy_sd.ops.packing import pack_params, packed_bytes, weight_rows
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import U8, Bytes
from fastdeploy_sd.types.ranges import WHOLE, SliceRule

_OP = "pack_linear"
_PANEL = 32
# Parts begin at multiples of it, where accesses of any width are aligned.
_ALIGNMENT = 256


def pack_on_device(
    device: CudaDevice, address: int, matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule = WHOLE
) -> None:
    """Start packing a matrix into a GPU's memory at a 64-byte aligned address; its parts are read at the return.

    Raises ConfigError: the library has no such kernel; MemoryError: there is no memory for a piece.
    """
    for struct in ("PackLinearParams", "WeightRows"):
        device.library.verify(_OP, struct)
    num_rows, in_features = matrix.shape
    panel_bytes = packed_bytes(in_features, _PANEL, fmt, slices)
    with device.loading(_staged_bytes(matrix)) as uploads:
        at_once = _rows_at_once(matrix, uploads.piece_bytes)
        for begin in range(0, num_rows, at_once):
            piece = matrix.rows([range(begin, min(begin + at_once, num_rows))])
            _pack(device, uploads, address + begin // _PANEL * panel_bytes, piece, fmt, slices)


def pack_groups_on_device(device: CudaDevice, address: int, stored: StoredMatrix) -> None:
    """Start packing a matrix as it is stored into a GPU's memory, to the bytes of `pack_groups`; otherwise as above."""
    device.library.verify("pack_integers", "PackIntegersParams")
    (num_rows, in_features), fmt, slices = stored.shape, stored.format, stored.slices
    panel_bytes = packed_bytes(in_features, _PANEL, fmt, slices)
    num_units = sum(-(-len(piece) // UNIT) for piece in slices.ranges(in_features))
    bits = GROUP_FORMATS[fmt].bits if fmt in GROUP_FORMATS else 8  # of e4m3
    unit_bytes = packed_bytes(UNIT, _PANEL, fmt) - UNIT * _PANEL * bits // 8
    staged_bytes = _aligned(_PANEL * in_features) + num_units * unit_bytes  # of a panel
    with device.loading(-(-num_rows // _PANEL) * staged_bytes) as uploads:
        at_once = max(uploads.piece_bytes // max(staged_bytes, 1), 1) * _PANEL
        for begin in range(0, num_rows, at_once):
            rows = range(begin, min(begin + at_once, num_rows))
            shape, own_panels = (len(rows), in_features), -(-len(rows) // _PANEL)
            code_bytes = _aligned(len(rows) * in_features)
            host, staged = uploads.take(code_bytes + own_panels * num_units * unit_bytes)
            codes = host[: len(rows) * in_features].view(np.int8).reshape(shape)
            factors = host[code_bytes:].reshape(own_panels, num_units, unit_bytes)
            stored.each(rows, _into(begin, codes, factors))
            uploads.copy(staged, host)
            to = address + begin // _PANEL * panel_bytes
            params = pack_integers_params(to, shape, stored, staged, staged + code_bytes)
            device.library.launch("pack_integers", params, 0, device.stream)


def _into(begin: int, codes: I8, factors: U8) -> Callable[[range, I8, U8], None]:
    """Return what writes rows of a matrix where they belong in a piece of its rows from `begin` on."""

    def write(rows: range, own: I8, own_factors: U8) -> None:
        codes[rows.start - begin : rows.stop - begin] = own
        first = (rows.start - begin) // _PANEL
        factors[first : first + len(own_factors)] = own_factors

    return write


def send_packed(device: CudaDevice, address: int, data: Bytes) -> None:
    """Start copying a matrix that is packed already; it is read at the return.

    Raises MemoryError: there is no memory for a piece.
    """
    with device.loading(data.nbytes) as uploads:
        uploads.send(address, data.nbytes, 1, lambda rows, out: uploads.fill(out, data[rows]))


def _pack(
    device: CudaDevice, uploads: CudaUploads, address: int, matrix: WeightMatrix, fmt: LinearFormat, slices: SliceRule
) -> None:
    row_type: Any = struct_type("WeightRows")
    host, staged = uploads.take(_staged_bytes(matrix))
    table = (row_type * len(matrix.parts)).from_buffer(host)
    begin = _aligned(ctypes.sizeof(table))
    for i, part in enumerate(matrix.float_parts()):
        data = part.data
        table[i] = weight_rows(part, staged + begin)
        uploads.fill(host[begin : begin + data.nbytes].view(data.dtype).reshape(data.shape), data)
        begin += _aligned(data.nbytes)
    uploads.copy(staged, host)
    device.library.launch(_OP, pack_params(address, matrix, fmt, slices, staged), 0, device.stream)


def _staged_bytes(matrix: WeightMatrix) -> int:
    """Return the bytes of a piece: a table of its parts, and their elements."""
    table_bytes = len(matrix.parts) * ctypes.sizeof(struct_type("WeightRows"))
    return _aligned(table_bytes) + sum(_aligned(part.data.nbytes) for part in matrix.float_parts())


def _rows_at_once(matrix: WeightMatrix, piece_bytes: int) -> int:
    """Return the rows of as many panels as fit into a piece, at least one."""
    row_bytes = matrix.shape[1] * max(part.data.itemsize for part in matrix.float_parts())
    left = piece_bytes - (len(matrix.parts) + 1) * 2 * _ALIGNMENT
    return max(left // max(row_bytes, 1) // _PANEL, 1) * _PANEL


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
