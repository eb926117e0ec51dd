"""What a service of experts is told: a layer of them, where one lies, and what runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy.typing as npt


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
