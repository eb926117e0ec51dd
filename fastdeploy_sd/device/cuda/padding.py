"""Fills the inputs of passes on a GPU up to rounded sizes, so that few graphs serve all.

A row's bits do not depend on other rows, so added rows change nothing. The first calls of the pass fill them on the
device: the code that writes a step's inputs need not know of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.device.device_tensor import DeviceTensor
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import CParams
from fastdeploy_sd.device.program.declaration import ELEMENT_BYTES
from fastdeploy_sd.device.program.program import Recording
from fastdeploy_sd.device.program.recorder import Size

OP = "pad_columns"


class Columns:
    """The inputs of a recording by the size that counts their rows; `sizes`: by which there are calls, in order.

    Raises ValueError: an input that is no column is to be filled, or one of floats with something else than 0, or one
    with its last element that may have none.
    """

    def __init__(self, recording: Recording, inputs: Any) -> None:
        by_size: dict[str, list[Any]] = {}
        column_type: Any = struct_type("PadColumn")
        for name, value in (recording.padding or {}).items():
            tensor: DeviceTensor = inputs[name]
            dim = recording.recorder.inputs[name].shape[0]
            assert isinstance(dim, Size)
            is_zero = tensor.element == "float32" and value == 0  # the same bits
            if len(tensor.shape) != 1 or not (is_zero or tensor.element in ("int32", "int64")):
                raise ValueError(f"padding: {name}: expected a column of int32 or int64, or zeros, got {tensor}")
            if value == "last" and dim.extra < 1:
                raise ValueError(f"padding: {name}: expected a number where a step may have no row, got last")
            column = column_type(
                column=tensor.address,
                element_bytes=ELEMENT_BYTES[tensor.element],
                extra=dim.extra,
                repeats_last=value == "last",
                value=0 if value == "last" else value,
            )
            by_size.setdefault(dim.name, []).append(column)
        self.sizes = tuple(Size(name) for name in by_size)
        self._of_size = [(column_type * len(columns))(*columns) for columns in by_size.values()]

    def tables(self) -> list[npt.NDArray[np.uint8]]:
        """Return what a call reads of the device's memory, by size: its columns."""
        return [np.frombuffer(bytes(columns), np.uint8) for columns in self._of_size]

    def params(self, i: int, table: int, num_own: int) -> CParams:
        """Return the params of a size's call, whose num_rows is filled in by a run.

        `table` is the address of its columns, `num_own` that of an i32, the rows that a run has of its own.
        """
        made: CParams = struct_type("PadColumnsParams")(
            num_columns=len(self._of_size[i]), columns=table, num_own=num_own
        )
        return made


def offset_of_num_rows() -> int:
    """Return where a call's params have the number of rows."""
    offset: int = struct_type("PadColumnsParams").num_rows.offset
    return offset
