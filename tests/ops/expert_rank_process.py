"""One rank of those that share experts, in a process without Paddle: does what its standard input says.

Usage: python -m tests.ops.expert_rank_process FD RANK SIZE TIMEOUT_S
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastdeploy_sd.device import expert_service, library
from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.device.expert_types import ExpertSlot
from fastdeploy_sd.device.layout import struct_type
from fastdeploy_sd.device.library import call
from fastdeploy_sd.distributed.expert_planner import ExpertPlanner
from fastdeploy_sd.models.sharding import spread_experts
from fastdeploy_sd.types import F32
from fastdeploy_sd.worker.ranks.expert_mover import ExpertMover
from tests.ops.expert_model import Layer, Placement, Ranks, linear_placement, random_layer
from tests.ops.rank_process import serve

NUM_LAYERS, HIDDEN, NUM_EXPERTS = 2, 256, 8
# Of many tokens an expert takes some milliseconds, so that ranks are stopped while they run one.
INNER, MAX_TOKENS = 512, 256


def layers() -> list[Layer]:
    return [random_layer(60 + i, (NUM_EXPERTS, HIDDEN, INNER), "bfloat16", top_k=4) for i in range(NUM_LAYERS)]


def placement_of(size: int) -> Placement:
    """Return where experts are at first: each rank has one slot more than experts, so that they can move."""
    return linear_placement(NUM_EXPERTS, size, -(-NUM_EXPERTS // size) + 1)


def tokens(seed: int, count: int) -> F32:
    x: F32 = np.random.default_rng(seed).standard_normal((count, HIDDEN), np.float32)
    return x


def run_layer(service: ExpertService, x: F32, layer: Layer, index: int) -> F32:
    """As both ops one after the other, which import Paddle."""
    count, hidden = x.shape
    ids: np.ndarray = np.empty((count, layer.routing["top_k"]), np.int32)
    weights: F32 = np.empty(ids.shape, np.float32)
    y = np.empty_like(x)
    common = {
        "service": service.handle,
        "layer": index,
        "num_tokens": count,
        "hidden_size": hidden,
        "num_parts": 1,
        "x": x.ctypes.data,
        "expert_ids": ids.ctypes.data,
        "weights": weights.ctypes.data,
        "top_k": ids.shape[1],
    }
    router = {"router_weight": layer.router_weight.ctypes.data, "normalize": 1, "norm_min": 1e-12, "scale": 1.0}
    router |= {"num_groups": 1, "num_chosen_groups": 1, "num_experts": layer.num_experts, "is_first": index == 0}
    call("dispatch_experts", struct_type("DispatchExpertsParams")(**common, **router))
    sums = {"num_slices": 1, "is_last": index == NUM_LAYERS - 1, "y": y.ctypes.data}
    call("combine_experts", struct_type("CombineExpertsParams")(**common, **sums))
    return y


def run_passes(service: ExpertService, own: list[Layer], seed: int, count: int, times: int) -> str:
    """Passes whose layers feed one another; what to compare results by."""
    found = hashlib.blake2b(digest_size=16)
    for p in range(times):
        x = tokens(seed + p, count)
        for index, layer in enumerate(own):
            x = run_layer(service, x, layer, index)
        found.update(x.tobytes())
    return found.hexdigest()


def follow_targets(service: ExpertService, own: list[Layer]) -> None:
    """Take and free experts as the targets say; packing one takes some milliseconds."""

    def memory_of(layer: Layer) -> Any:
        def pack(expert: int, place: ExpertSlot) -> ExpertSlot:
            time.sleep(0.005)
            return layer.slot(expert)

        return SimpleNamespace(places=[layer.slot(0)] * service.shape.num_slots, pack=pack)

    ExpertMover(service, {i: memory_of(layer) for i, layer in enumerate(own)}).start()


def shuffle(planner: ExpertPlanner, service: ExpertService) -> None:
    """Set goals drawn at random as soon as the last ones are reached."""
    if not planner.follow():
        for layer in service.layers:
            names = random.sample(range(NUM_EXPERTS), NUM_EXPERTS)
            ranges = spread_experts(NUM_EXPERTS, service.shape.num_ranks, 0)
            planner.seek(layer, [{names[expert] for expert in own} for own in ranges])


def main() -> int:
    fd, rank, size = map(int, sys.argv[1:4])
    library.set_num_threads(1)
    expert_service._PAUSE_S = 0.005  # experts move often
    own = layers()
    ranks = Ranks(own, placement_of(size), np.float32, MAX_TOKENS, float(sys.argv[4]), fd)
    service = ranks.open(rank)
    planner = ExpertPlanner(service, num_redundant=0, interval_s=1e9)
    print(json.dumps(service.incarnation), flush=True)

    def follow(order: str, arguments: dict[str, Any]) -> Any:
        if order == "meet":
            service.wait_until_all_serve(60)
            return "ready"
        if order == "gone":
            return service.mark_gone(arguments["rank"])
        others: dict[str, Callable[[], Any]] = {
            "states": service.states,
            "drain": lambda: service.begin_drain(range(rank, rank + 1)),
            "lost": lambda: service.has_lost_experts,
            "follow": lambda: follow_targets(service, own),
            "shuffle": lambda: service.repeat(lambda: shuffle(planner, service), "shuffle"),
            "ordered": lambda: planner.num_ordered,
        }
        if order in others:
            return others[order]()
        assert order == "run", order
        return run_passes(service, own, **arguments)

    serve(follow)
    return 0


if __name__ == "__main__":
    sys.exit(main())
