"""rms_norm and concat_rms_norm: normalisation by the root of the mean square."""

from __future__ import annotations

from typing import cast

from fastdeploy_sd.device.program.declaration import ACTIVATIONS, F32, Attr, DTypeOf, In, Out, each
from fastdeploy_sd.device.program.op import A, Op

RMS_NORM = Op(
    "rms_norm",
    "num_rows",
    x=In(ACTIVATIONS, "num_rows, hidden_size"),
    residual=In(F32, "num_rows, hidden_size", optional=True),
    weight=In(F32, "hidden_size"),
    eps=Attr(float),
    dtype=DTypeOf("x"),
    y=Out("x", "num_rows, hidden_size"),
    residual_out=Out(F32, "num_rows, hidden_size"),
)
CONCAT_RMS_NORM = Op(
    "concat_rms_norm",
    "num_rows",
    first=In(ACTIVATIONS, "num_rows, hidden_size"),
    second=In("first", "num_rows, hidden_size"),
    **each(In(F32, "hidden_size"), "first_weight", "second_weight"),
    eps=Attr(float),
    dtype=DTypeOf("first"),
    y=Out("first", "num_rows, 2*hidden_size"),
)


def rms_norm(x: A, weight: A, eps: float, residual: A | None = None) -> tuple[A, A]:
    """Add the residual stream f32[T, H] and normalise: h = x (+ residual), y = h / rms(h) * weight.

    Returns:
        y in x's dtype [T, H] and h, f32[T, H]: the residual stream stays in float32.
    """
    return cast("tuple[A, A]", RMS_NORM(x=x, residual=residual, weight=weight, eps=eps))


def concat_rms_norm(first: A, second: A, first_weight: A, second_weight: A, eps: float) -> A:
    """Normalise two matrices [T, H] apart and put them side by side, [T, 2 * H]: a draft layer's input."""
    weights = {"first_weight": first_weight, "second_weight": second_weight}
    return cast("A", CONCAT_RMS_NORM(first=first, second=second, **weights, eps=eps))
