"""The shape of an op case: one op, its three callables and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OpCases:
    """Everything the harness needs to test one op on every backend.

    Attributes:
        native, reference: functions of the same keyword arguments, returning one array or a tuple.
        paddle: the same over Paddle tensors: takes and returns NumPy arrays (bfloat16 as u16 bits). None: not an op of
            Paddle.
        inputs: case name -> keyword arguments.
        rtol, atol: for float32 outputs; bfloat16 outputs may differ by bf16_ulps units in the last place.
        bf16_atol: in place of atol for bfloat16 outputs of an op that rounds on its way; None: atol.
    """

    name: str
    native: Callable[..., Any]
    reference: Callable[..., Any]
    paddle: Callable[..., Any] | None
    inputs: Mapping[str, Mapping[str, Any]]
    rtol: float = 1e-5
    atol: float = 1e-6
    bf16_ulps: float = 1.0
    bf16_atol: float | None = None
