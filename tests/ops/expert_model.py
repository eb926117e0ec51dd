"""Layers of experts for tests of ranks that share them, and who has which. Needs no Paddle."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdeploy_sd.device.arrays import address
from fastdeploy_sd.device.cuda.experts import GpuExperts
from fastdeploy_sd.device.cuda.library import CudaLibrary
from fastdeploy_sd.device.cuda.memory import Allocator, CudaMemory
from fastdeploy_sd.device.expert_service import ExpertService, ServiceShape, expert_segment
from fastdeploy_sd.device.expert_types import ExpertLayer, ExpertSlot
from fastdeploy_sd.device.memory import WeightMemory
from fastdeploy_sd.ops.linear_format import format_code
from fastdeploy_sd.ops.moe import moe_ffn
from fastdeploy_sd.ops.packing import PackedExperts, experts_shape, pack_into, packed_bytes
from fastdeploy_sd.ops.weight_matrix import WeightMatrix
from fastdeploy_sd.types import F32

# Returns where an array is on the device.
Place = Callable[[np.ndarray], int]
# Expert ids of each rank's slots, None = empty.
Placement = Sequence[Sequence[int | None]]


@dataclass(frozen=True)
class Layer:
    """Packed experts, and what moe_ffn takes besides."""

    router_weight: F32
    gate_up: PackedExperts[Any]
    down: PackedExperts[Any]
    routing: Mapping[str, Any]
    biases: tuple[F32 | None, F32 | None] = (None, None)  # of gate_up, of down
    gate_limit: float | None = None

    @property
    def num_experts(self) -> int:
        return len(self.router_weight)

    def slots(self, experts: Sequence[int | None], place: Place) -> list[ExpertSlot | None]:
        places = []
        for array in (self.gate_up.data, self.down.data, *self.biases):
            begin, size = (0, 0) if array is None else (place(array), array.nbytes // self.num_experts)
            places.append([begin + i * size for i in range(self.num_experts)])
        return [None if e is None else ExpertSlot(e, *(of_part[e] for of_part in places)) for e in experts]

    def slot(self, expert: int) -> ExpertSlot:
        [slot] = self.slots([expert], address)
        assert slot is not None
        return slot

    def register(
        self, service: ExpertService, layer: int, slots: Sequence[int | None], dtype: Any, place: Place = address
    ) -> None:
        what = ExpertLayer(
            self.num_experts,
            self.down.out_features,
            self.down.in_features,
            self.routing["top_k"],
            dtype,
            format_code(self.gate_up.format),
            format_code(self.down.format),
            self.gate_limit,
        )
        service.register_layer(layer, what, self.slots(slots, place))


def pack_experts(weights: Sequence[np.ndarray] | np.ndarray, fmt: Any) -> PackedExperts[np.ndarray]:
    """Pack arrays [N, K], or one [E, N, K], as WeightPacker does."""
    matrices = [WeightMatrix.whole(weight) for weight in weights]
    out_features, in_features = experts_shape(matrices)
    size = packed_bytes(in_features, out_features, fmt)
    data = WeightMemory().take(len(matrices) * size)
    for i, matrix in enumerate(matrices):
        pack_into(data.ctypes.data + i * size, matrix, fmt)
    return PackedExperts(data, len(matrices), in_features, out_features, fmt)


def random_layer(seed: int, sizes: tuple[int, int, int], fmt: Any = "float32", **options: Any) -> Layer:
    """A layer of random experts.

    Args:
        sizes: experts, hidden and intermediate size.
        options: the router's, gate_limit and has_bias.
    """
    num_experts, hidden, inner = sizes
    rng = np.random.default_rng(seed)
    router = (rng.standard_normal((num_experts, hidden)) / np.sqrt(hidden)).astype(np.float32)
    gate_up = (rng.standard_normal((num_experts, 2 * inner, hidden)) / np.sqrt(hidden)).astype(np.float32)
    down = (rng.standard_normal((num_experts, hidden, inner)) / np.sqrt(inner)).astype(np.float32)
    gate_limit = options.pop("gate_limit", None)
    biases: tuple[F32 | None, F32 | None] = (None, None)
    if options.pop("has_bias", False):
        of_gate_up, of_down = (rng.standard_normal((num_experts, size), np.float32) for size in (2 * inner, hidden))
        biases = of_gate_up, of_down
    routing = {"top_k": 2, "normalize": True, "norm_min": 1e-12} | options
    return Layer(router, pack_experts(gate_up, fmt), pack_experts(down, fmt), routing, biases, gate_limit)


def in_one_process(layer: Layer, x: np.ndarray, **options: Any) -> np.ndarray:
    """Return what all experts together compute, on the device of ops at the time."""
    y: np.ndarray = moe_ffn(
        x,
        layer.router_weight,
        layer.gate_up,
        layer.down,
        gate_up_bias=layer.biases[0],
        down_bias=layer.biases[1],
        gate_limit=layer.gate_limit,
        **layer.routing,
        **options,
    )
    return y


def linear_placement(num_experts: int, num_ranks: int, num_slots: int | None = None) -> list[list[int | None]]:
    """Ranges of experts, one after another."""
    borders = [num_experts * r // num_ranks for r in range(num_ranks + 1)]
    most = num_slots or max(b - a for a, b in itertools.pairwise(borders))
    found: list[list[int | None]] = []
    for begin, end in itertools.pairwise(borders):
        found.append([*range(begin, end), *[None] * (most - (end - begin))])
    return found


def shape_of(layers: Sequence[Layer], placement: Placement, max_tokens: int) -> ServiceShape:
    hidden = max(layer.down.out_features for layer in layers)
    return ServiceShape(
        num_ranks=len(placement),
        num_layers=len(layers),
        num_experts=max(layer.num_experts for layer in layers),
        num_slots=len(placement[0]),
        top_k=max(layer.routing["top_k"] for layer in layers),
        hidden_size=hidden,
        row_bytes=4 * hidden,
        max_tokens=max_tokens,
    )


@dataclass
class Gpu:
    """The GPU of a rank.

    Attributes:
        on_wait: see CudaTransfers.
        kept: what `place` has taken.
    """

    library: CudaLibrary
    stream: int
    on_wait: list[Callable[[], None]] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)

    def place(self, array: np.ndarray) -> int:
        """Return the address of a copy on the GPU."""
        memory, found = CudaMemory(Allocator(self.library)).take(max(array.nbytes, 1))
        self.library.call("copy", found, address(array), ctypes.c_int64(array.nbytes))
        self.kept.append(memory)
        return found


@dataclass
class Ranks:
    """Ranks, each with its own service over one segment; `services` are those in this process."""

    layers: Sequence[Layer]
    placement: Placement
    dtype: Any
    max_tokens: int
    timeout_s: float
    fd: int = field(default_factory=expert_segment)
    services: list[ExpertService] = field(default_factory=list)
    gpu: Gpu | None = None

    def open(self, rank: int) -> ExpertService:
        """Return a rank that serves: what others ask it for, if it was started before."""
        shape = shape_of(self.layers, self.placement, self.max_tokens)
        service = ExpertService.open(self.fd, rank, shape, self.timeout_s)
        place: Place = address
        if self.gpu is not None:
            experts = GpuExperts(self.gpu.library, self.gpu.stream, service, self.fd, self.timeout_s)
            self.gpu.on_wait.append(experts.verify)
            place = self.gpu.place
        for i, layer in enumerate(self.layers):
            held = [None if e < 0 else e for e in service.placement(i, has_retired=True)[rank].tolist()]
            slots = held if any(e is not None for e in held) else self.placement[rank]
            layer.register(service, i, slots, self.dtype, place)
        service.start()
        return service


@contextlib.contextmanager
def ranks_of(
    layers: Sequence[Layer],
    placement: Placement,
    dtype: Any = np.float32,
    max_tokens: int = 64,
    timeout_s: float = 60.0,
    gpu: Gpu | None = None,
) -> Iterator[Ranks]:
    """Give ranks that serve, of all of the placement; on a GPU there is one, as each has a GPU of its own."""
    ranks = Ranks(layers, placement, dtype, max_tokens, timeout_s, gpu=gpu)
    try:
        ranks.services += [ranks.open(rank) for rank in range(len(placement))]
        yield ranks
    finally:
        for service in ranks.services:
            service.abort()
        for service in ranks.services:
            service.close()
        if gpu is not None:
            gpu.on_wait.clear()
        os.close(ranks.fd)
