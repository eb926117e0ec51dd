"""The types of safetensors files, and a writer of them: whole, or not at all."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.process.files import replacing

DTYPES: Mapping[str, npt.DTypeLike] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
    # Eight-bit floats are read as bits.
    "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip
ITEM_BYTES: Mapping[str, int] = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}
Entries = Mapping[str, tuple[str, tuple[int, ...]]]


def num_bytes_of(entries: Entries) -> int:
    """Return what tensors take; `entries`: name -> type and shape."""
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in entries.values())


def write_safetensors(
    path: Path, entries: Entries, tensors: Iterable[npt.NDArray[Any]], on_written: Callable[[int], object]
) -> None:
    """Write tensors in the order of their entries; `on_written` gets the bytes of each. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in tensors:
            file.write(np.ascontiguousarray(data).data)
            on_written(data.nbytes)
