"""Small constant arrays that calls read: norms' weights, biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.tensors import aligned_zeros


def constant(array: npt.NDArray[np.generic]) -> Tensor:
    """Return a tensor with a copy of an array in the device's memory; u16 is taken as bfloat16.

    Raises ValueError: of a type that tensors lack.
    """
    copy: npt.NDArray[Any] = aligned_zeros(array.shape, array.dtype)
    copy[...] = array
    return device().wrap(copy)
