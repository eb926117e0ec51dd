"""Writes safetensors files: whole, or not at all."""

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

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1
}  # fmt: skip
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
