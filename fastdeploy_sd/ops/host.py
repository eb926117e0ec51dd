"""NumPy arrays of the host as Paddle CPU tensors, without a copy where possible."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor
from paddle.utils.dlpack import from_dlpack


def host_tensor(array: npt.NDArray[np.generic]) -> Tensor:
    """Return a CPU tensor of the array's memory; of a copy when the array is read-only, which DLPack cannot express."""
    if not array.flags.writeable:
        return paddle.to_tensor(array, place=paddle.CPUPlace())
    return from_dlpack(array)
