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

    x is f32, bf16 or f16 [T, N]; it is returned itself when it has the dtype already. The dtype is of the library that
    x is an array of.
    """
    return x if x.dtype == dtype else CAST(x=x, y_dtype=dtype_name(dtype))
