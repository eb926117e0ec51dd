"""Linear layers over packed weights: whole ones, and two ways to share one out among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import constant
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.device.expert_types import ExpertSlot
from fastdeploy_sd.models.checkpoint import Weights
from fastdeploy_sd.models.sharding import spread_experts
from fastdeploy_sd.ops.adapter_slots import AdapterSlots
from fastdeploy_sd.ops.collective import AnyCommunicator, all_gather, all_reduce
from fastdeploy_sd.ops.linear import linear
from fastdeploy_sd.ops.lora import lora_expand_, lora_shrink
from fastdeploy_sd.ops.packing import PackedLinear
from fastdeploy_sd.types.ranges import SliceRule
from fastdeploy_sd.types.shard import WHOLE_MODEL, Shard


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMemory:
    """Memory of a layer's slots on one rank, and what fills it.

    Attributes:
        places: of every slot; `expert` is what it was packed with.
        pack: writes another expert into a place and returns it; any thread may call it.
    """

    places: Sequence[ExpertSlot]
    pack: Callable[[int, ExpertSlot], ExpertSlot]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroup:
    """One rank's view of the ranks over which experts are spread.

    Attributes:
        service: of this rank.
        first_layer: the number of a decoder's first layer with experts among those of all decoders.
        num_redundant: of a layer's slots besides one for each expert; None = experts stay where they are.
        moves: layer -> what packs its experts anew, filled while the model is built.
    """

    service: ExpertService
    first_layer: int = 0
    num_redundant: int | None = None
    moves: dict[int, ExpertMemory] = field(default_factory=dict)

    def experts_of(self, layer: int, num_experts: int) -> tuple[int, ...]:
        """Return the expert of each slot with which this rank begins, -1 = none.

        If it was started before, they are those that others may have asked it for, in the same slots.
        """
        service = self.service
        found = tuple(service.placement(layer, has_retired=True)[service.rank].tolist())
        if max(found) >= 0:
            return found
        first = spread_experts(num_experts, service.shape.num_ranks, self.num_redundant or 0)[service.rank]
        return (*first, *[-1] * (service.shape.num_slots - len(first)))


class TpGroup:
    """One rank's view of its group. A rank that is alone has no communicator.

    `experts`: None = they are not spread.
    """

    def __init__(self, communicator: AnyCommunicator | None = None, experts: ExpertGroup | None = None) -> None:
        self.shard = WHOLE_MODEL if communicator is None else Shard(communicator.rank, communicator.size)
        self.communicator, self.experts = communicator, experts

    @property
    def spread(self) -> Shard | None:
        """This rank among those over which experts are spread, None = they are not."""
        return None if self.experts is None else Shard(self.experts.service.rank, self.experts.service.shape.num_ranks)

    @property
    def is_alone(self) -> bool:
        return self.shard.size == 1


ALONE = TpGroup()


class LinearLayer(Protocol):
    """y = x . weight^T (+ bias)."""

    def __call__(self, x: Tensor, out_dtype: paddle.dtype | None = None) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype, or in out_dtype."""
        ...


class AdaptedLayer(Protocol):
    """A LinearLayer that may have adapters."""

    def __call__(self, x: Tensor, *, slots: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype, each row with the adapter in its slot of i32[T]; None = without any."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LinearAdapters:
    """The adapters of a layer.

    Attributes:
        slices: of the rank's sum over its inputs.
        communicator: of the ranks that share the inputs out, None = each has all.
    """

    slots: AdapterSlots[Tensor]
    slices: SliceRule
    communicator: AnyCommunicator | None = None

    def add_to(self, y: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """Add to the layer's output, in place, what its rows' adapters make of its input; return it."""
        u = lora_shrink(x, slots, self.slots, self.slices)
        if self.communicator is not None:
            u = all_reduce(u, self.communicator, paddle.float32)
        lora_expand_(y, u, slots, self.slots)
        return y


class Linear:
    """A layer that needs no other rank: a whole one, or one whose outputs stay with the rank."""

    def __init__(
        self, packed: PackedLinear[Tensor], bias: Weights | None, adapters: LinearAdapters | None = None
    ) -> None:
        self._packed, self._adapters = packed, adapters
        self._bias = None if bias is None else constant(bias)

    def __call__(self, x: Tensor, out_dtype: paddle.dtype | None = None, *, slots: Tensor | None = None) -> Tensor:
        y = linear(x, self._packed, self._bias, out_dtype)
        return y if slots is None or self._adapters is None else self._adapters.add_to(y, x, slots)


class SummedLinear:
    """A layer whose inputs are shared out: x [T, K / ranks] -> [T, N], the sum over all ranks, then the whole bias."""

    def __init__(
        self,
        packed: PackedLinear[Tensor],
        bias: Weights | None,
        group: TpGroup,
        adapters: LinearAdapters | None = None,
    ) -> None:
        self._packed, self._group, self._adapters = packed, group, adapters
        self._bias = None if bias is None else constant(bias)

    def __call__(self, x: Tensor, out_dtype: paddle.dtype | None = None, *, slots: Tensor | None = None) -> Tensor:
        partial = linear(x, self._packed, None, paddle.float32)
        y = all_reduce(partial, self._group.communicator, x.dtype if out_dtype is None else out_dtype, self._bias)
        return y if slots is None or self._adapters is None else self._adapters.add_to(y, x, slots)


class GatheredLinear:
    """A layer whose outputs are shared out: x [T, K] -> [T, N], of which the rank computes some columns."""

    def __init__(
        self, packed: PackedLinear[Tensor], bias: Weights | None, group: TpGroup, num_columns: int, unit: int
    ) -> None:
        self._own, self._group, self._num_columns, self._unit = Linear(packed, bias), group, num_columns, unit

    def __call__(self, x: Tensor, out_dtype: paddle.dtype | None = None) -> Tensor:
        return all_gather(self._own(x, out_dtype), self._group.communicator, self._num_columns, self._unit)
