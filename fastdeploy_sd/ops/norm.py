"""rms_norm and concat_rms_norm on Paddle tensors."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.ops import shim


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add the residual stream and normalise: h = x (+ residual), y = h / rms(h) * weight.

    Args:
        x: f32 or bf16 [T, H].
        weight: f32[H].
        residual: f32[T, H].

    Returns:
        y in x's dtype [T, H] and h, f32[T, H]: the residual stream stays in float32.

    Raises:
        ValueError: a shape or dtype disagrees.
    """
    y, residual_out = shim.run("rms_norm", x, weight, residual, eps)
    return y, residual_out


def concat_rms_norm(first: Tensor, second: Tensor, first_weight: Tensor, second_weight: Tensor, eps: float) -> Tensor:
    """Normalise two matrices apart and put them side by side: the input of a draft layer's projection.

    Args:
        first, second: f32 or bf16 [T, H].
        first_weight, second_weight: f32[H].

    Returns:
        The same dtype, [T, 2 * H]; a row is [first | second].

    Raises:
        ValueError: a shape or dtype disagrees.
    """
    return shim.run("concat_rms_norm", first, second, first_weight, second_weight, eps)[0]
