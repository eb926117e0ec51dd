"""What stands for a Paddle tensor where the memory is a device's that Paddle does not know."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import paddle

from fastdeploy_sd.device.device_array import DeviceArray
from fastdeploy_sd.device.program.declaration import ANY
from fastdeploy_sd.device.program.host_op import array_dtype_name


class DeviceTensor(DeviceArray):
    """An array of a device for layers and recordings, which ask a tensor for its dtype, shape and address."""

    __slots__ = ()

    @property
    def dtype(self) -> paddle.dtype:
        """Paddle's name of its element type."""
        return cast("paddle.dtype", getattr(paddle, self.element))


def element_of(dtype: npt.DTypeLike) -> str:
    """Return the name of an array's element type; uint16 is bfloat16.

    Raises:
        ValueError: no op has such elements.
    """
    name = array_dtype_name(dtype)
    if name not in ANY:
        raise ValueError(f"array: expected elements of {', '.join(ANY)}, got {name}")
    return name


def array_type(element: str) -> np.dtype[np.generic]:
    """Return NumPy's type of a tensor's elements; bfloat16 is uint16."""
    return np.dtype("uint16" if element == "bfloat16" else element)
