"""Numbers of 16 bits in NumPy, computed in float32. It has float16 but no bfloat16, which is stored as u16 bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.types import F32, U16


def to_bf16(x: npt.ArrayLike) -> U16:
    """Round float32 to bfloat16 bits: to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(bits: U16) -> F32:
    """Widen bfloat16 bits to float32, exactly."""
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def storage(dtype: str) -> np.dtype[np.generic]:
    """Return NumPy's type of float32, float16 or bfloat16, which is stored as its bits."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def widen(x: npt.NDArray[np.generic]) -> F32:
    """Return float32 values of an array holding float32, float16 or bfloat16 bits (u16)."""
    return from_bf16(x.astype(np.uint16)) if x.dtype == np.uint16 else x.astype(np.float32)


def narrow(x: F32, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Return x as float32, as float16, whose magnitudes end at 65504, or, for dtype u16, as bfloat16 bits."""
    if np.dtype(dtype) == np.uint16:
        return to_bf16(x)
    with np.errstate(over="ignore"):  # rounded to infinity, as everywhere
        return x.astype(np.dtype(dtype))
