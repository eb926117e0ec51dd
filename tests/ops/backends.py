"""The implementations every op case runs on: each instruction-set level through NumPy, and the Paddle operators.

bfloat16 arrays are u16 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import numpy as np
import paddle

from fastdeploy_sd.device import library

_OWN_LEVELS = library.available_isas()
# The tiles that `tiles` lets level amx mean now, if any.
_assumed: list[str] = []
# Every level that tests can run: amx wherever there is AVX-512, without the chip's tiles on their twin.
LEVELS = _OWN_LEVELS if "avx512" not in _OWN_LEVELS or "amx" in _OWN_LEVELS else (*_OWN_LEVELS, "amx")


@contextlib.contextmanager
def isa(name: str) -> Iterator[None]:
    """Run the body at one of `LEVELS`."""
    before = library.isa()
    if name == before:
        yield
        return
    needs_twin = name == "amx" and name not in _OWN_LEVELS and not _assumed
    with tiles("twin") if needs_twin else contextlib.nullcontext():
        library.set_isa(name)
        try:
            yield
        finally:
            library.set_isa(before)


@contextlib.contextmanager
def tiles(kind: Literal["chip", "twin"]) -> Iterator[None]:
    """Let level amx mean these tiles in the body, which begins and ends on another level."""
    library.assume_tiles(kind)
    _assumed.append(kind)
    try:
        yield
    finally:
        _assumed.pop()
        library.assume_tiles(None)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run the body with `count` kernel threads."""
    before = library.num_threads()
    library.set_num_threads(count)
    try:
        yield
    finally:
        library.set_num_threads(before)


def to_paddle(array: np.ndarray | None) -> paddle.Tensor | None:
    """Copy a NumPy array to a Paddle tensor; u16 bits become bfloat16."""
    if array is None:
        return None
    if array.dtype == np.uint16:
        return paddle.to_tensor(array, dtype="bfloat16", place=paddle.CPUPlace())
    return paddle.to_tensor(array, place=paddle.CPUPlace())


def from_paddle(tensor: paddle.Tensor | np.ndarray) -> np.ndarray:
    """Inverse of to_paddle; an array stays."""
    return tensor if isinstance(tensor, np.ndarray) else np.asarray(tensor.numpy())
