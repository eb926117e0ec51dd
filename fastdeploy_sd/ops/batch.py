"""gather_output_rows on Paddle tensors; a step's maps are built from host arrays, see native/batch.py."""

from __future__ import annotations

import numpy as np
from paddle import Tensor

from fastdeploy_sd.ops import shim
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.types import I32


def gather_output_rows(x: Tensor, indices: Tensor | I32) -> Tensor:
    """Return the rows of x that need logits.

    Args:
        x: [T, H], any dtype.
        indices: i32[L], rows of x, on the host or a tensor.

    Returns:
        [L, H] in x's dtype.

    Raises:
        ValueError: a shape or dtype disagrees, or an index is outside x.
    """
    (y,) = shim.run("gather_output_rows", x, from_numpy(indices) if isinstance(indices, np.ndarray) else indices)
    return y
