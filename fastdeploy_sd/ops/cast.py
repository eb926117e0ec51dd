"""cast: activations in another element type."""

from __future__ import annotations

from typing import Any

from fastdeploy_sd.device.program.declaration import ACTIVATIONS, Attr, DTypeOf, In, Out
from fastdeploy_sd.device.program.op import Op, dtype_name

CAST = Op(
    "cast",
    "num_rows",
    x=In(ACTIVATIONS, "num_rows, num_columns"),
    x_dtype=DTypeOf("x"),
    y_dtype=Attr(ACTIVATIONS),
    y=Out("y_dtype", "num_rows, num_columns"),
)


def cast(x: Any, dtype: Any) -> Any:
    """Return x in another dtype; bfloat16 and float16 are rounded to nearest, ties to even.

    Args:
        x: f32, bf16 or f16 [T, N].
        dtype: float32, bfloat16 or float16, of the library that x is an array of.

    Returns:
        [T, N]; x itself when it has the dtype already.

    Raises:
        ValueError: a shape or dtype disagrees.
    """
    return x if x.dtype == dtype else CAST(x=x, y_dtype=dtype_name(dtype))
