"""Feed-forward networks: dense ones with a gate, and mixture of experts with optional shared experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.device.expert_types import ExpertSlot
from fastdeploy_sd.models.decoder_config import Activation, MoeConfig
from fastdeploy_sd.models.layers.linear import AdaptedLayer, TpGroup
from fastdeploy_sd.ops.collective import all_reduce
from fastdeploy_sd.ops.experts import combine_experts, dispatch_experts
from fastdeploy_sd.ops.moe import RouterOptions, moe_ffn
from fastdeploy_sd.ops.packing import PackedExperts
from fastdeploy_sd.ops.rowwise import geglu, sigmoid_gate, swiglu

# Maps [T, H] to [T, H], each row with the adapter in its slot of i32[T]; None = without any.
FeedForward = Callable[[Tensor, Tensor | None], Tensor]
_GATES: Mapping[Activation, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu_tanh": geglu}


class GatedMlp:
    """down(activation(gate(x)) * up(x)), gate and up in one multiplication."""

    def __init__(self, gate_up: AdaptedLayer, activation: Activation, down: AdaptedLayer) -> None:
        self._gate_up, self._gate, self._down = gate_up, _GATES[activation], down

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        return self._down(self._gate(self._gate_up(x, slots=slots)), slots=slots)


class GatedExpert:
    """expert(x) * sigmoid(gate(x)), of gates [T, 1]."""

    def __init__(self, expert: FeedForward, gate: AdaptedLayer) -> None:
        self._expert, self._gate = expert, gate

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        return sigmoid_gate(self._expert(x, slots), self._gate(x, slots=slots))


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """How a token chooses its experts.

    Attributes:
        weight: f32[E, H]; its products are the logits.
        bias: f32[E] of the logits, or None.
        selection_bias: f32[E] added to the probabilities for choosing only, or None.
        config: how logits become probabilities and weights.
    """

    weight: Tensor
    bias: Tensor | None
    selection_bias: Tensor | None
    config: MoeConfig

    def options(self) -> RouterOptions:
        """Return what ops that route take besides the weight."""
        c = self.config
        return {
            "top_k": c.top_k,
            "normalize": c.normalize,
            "norm_min": c.norm_min,
            "scale": c.scale,
            "sigmoid": c.sigmoid,
            "num_groups": c.num_groups,
            "num_chosen_groups": c.num_chosen_groups,
            "router_bias": self.bias,
            "selection_bias": self.selection_bias,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The experts of a rank, a matrix each; the sum over them has num_slices.

    Attributes:
        ids: consecutive, unless they are spread.
        gate_up_bias, down_bias: f32[L, 2 * I] and f32[L, H], or None.
    """

    ids: Sequence[int]
    gate_up: PackedExperts[Tensor]
    down: PackedExperts[Tensor]
    num_slices: int
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def slots(self) -> list[ExpertSlot]:
        """Return where each expert lies in the device's memory."""
        parts = (self.gate_up.data, self.down.data, self.gate_up_bias, self.down_bias)
        count, places = self.down.num_experts, []
        for part in parts:
            begin, size = (0, 0) if part is None else (part.data_ptr(), device().num_bytes(part) // count)
            places.append([begin + i * size for i in range(count)])
        return [ExpertSlot(expert, *(place[i] for place in places)) for i, expert in enumerate(self.ids)]


@dataclass(frozen=True, slots=True, eq=False)
class ServedExperts:
    """A layer of experts that are spread over ranks.

    Attributes:
        service: of this rank's experts.
        number: of the layer, among those of all models.
        is_first, is_last: of the layers with experts that a pass of the model runs.
        num_slices: of the sum over a token's experts.
    """

    service: ExpertService
    number: int
    is_first: bool
    is_last: bool
    num_slices: int


class SpreadMoeMlp:
    """MoeMlp whose experts are spread: tokens go to the ranks that have theirs, and what these return is added here.

    Ranks of a tensor-parallel group, which have the same tokens, share them out.
    """

    def __init__(self, router: Router, experts: ServedExperts, shared: FeedForward | None, group: TpGroup) -> None:
        self._router, self._experts, self._shared, self._group = router, experts, shared, group

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        r, e, shard = self._router, self._experts, self._group.shard
        expert_ids: Tensor
        weights: Tensor
        expert_ids, weights = dispatch_experts(
            x, r.weight, e.service, e.number, part=shard.rank, num_parts=shard.size, is_first=e.is_first, **r.options()
        )
        # Computed while other ranks compute the tokens' experts.
        shared = None if self._shared is None else self._shared(x, slots)

        def combined(shared: Tensor | None, out_dtype: paddle.dtype | None = None) -> Tensor:
            return combine_experts(
                x, expert_ids, weights, e.service, e.number, part=shard.rank, num_parts=shard.size, is_last=e.is_last,
                num_slices=e.num_slices, shared=shared, out_dtype=out_dtype,
            )  # fmt: skip

        if self._group.is_alone:
            return combined(shared)
        return all_reduce(combined(None, paddle.float32), self._group.communicator, x.dtype, shared=shared)


class MoeMlp:
    """The chosen experts' weighted sum, plus the shared experts' output. A rank adds up those of its experts."""

    def __init__(self, router: Router, experts: Experts, shared: FeedForward | None, group: TpGroup) -> None:
        self._router, self._experts, self._shared, self._group = router, experts, shared, group

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        shared = None if self._shared is None else self._shared(x, slots)
        if self._group.is_alone:
            return self._sum(x, shared)
        return all_reduce(self._sum(x, None, paddle.float32), self._group.communicator, x.dtype, shared=shared)

    def _sum(self, x: Tensor, shared: Tensor | None, out_dtype: paddle.dtype | None = None) -> Tensor:
        r, e = self._router, self._experts
        y: Tensor = moe_ffn(
            x, r.weight, e.gate_up, e.down, gate_up_bias=e.gate_up_bias, down_bias=e.down_bias,
            gate_limit=r.config.gate_limit, shared=shared, first_expert=e.ids[0], num_slices=e.num_slices,
            out_dtype=out_dtype, **r.options(),
        )  # fmt: skip
        return y
