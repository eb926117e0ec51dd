"""What a service of experts is told: a layer of them, where one lies, and what runs them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy.typing as npt

from fastdeploy_sd.device.program.declaration import DTYPE_CODES
from fastdeploy_sd.device.program.host_op import array_dtype_name


@dataclass(frozen=True, slots=True)
class ExpertSlot:
    """Where an expert's weights lie: addresses of packed matrices, multiples of 64, and of biases, 0 = none."""

    expert: int
    gate_up: int
    down: int
    gate_up_bias: int = 0
    down_bias: int = 0


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """What the experts of a layer have in common; formats by their codes.

    Attributes:
        dtype: of x; uint16 is bfloat16.
        gate_limit: as moe_ffn's.
        num_groups: of consecutive experts, which the router chooses together.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    dtype: npt.DTypeLike
    gate_up_format: int
    down_format: int
    gate_limit: float | None = None
    num_groups: int = 1

    def params(self) -> dict[str, Any]:
        """Return the values of ExpertServiceLayerParams."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "num_groups"}
        return values | {"dtype": DTYPE_CODES[array_dtype_name(self.dtype)], "gate_limit": self.gate_limit or 0.0}


class ExpertRunner(Protocol):
    """What runs experts elsewhere than on the processor."""

    @property
    def has_lost_experts(self) -> bool:
        """See ExpertService.has_lost_experts."""
        ...

    def abort(self) -> None:
        """See ExpertService.abort."""
        ...

    def close(self) -> None:
        """Called when the service is closed."""
        ...
