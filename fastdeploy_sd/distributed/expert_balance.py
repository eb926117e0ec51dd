"""Where copies of experts lie, so that every rank has as much to compute: from counts of rows to a placement.

Knows no process and no weights. Source: EPLB of DeepSeek (github.com/deepseek-ai/EPLB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.types import I32

Loads = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertGroupShape:
    """What experts are spread over.

    Attributes:
        num_slots: of all ranks, each for one copy of an expert. Ranks have equally many, or the first ones one more.
        num_nodes: hosts or memory nodes, of equally many ranks and slots.
        num_groups: of consecutive experts, which the router chooses together; 1 = it knows none.
    """

    num_ranks: int
    num_slots: int
    num_nodes: int = 1
    num_groups: int = 1

    def slots_of(self) -> list[int]:
        """Return the number of slots of every rank."""
        few, num_more = divmod(self.num_slots, self.num_ranks)
        return [few + (rank < num_more) for rank in range(self.num_ranks)]

    def of_layer(self, num_experts: int) -> ExpertGroupShape:
        """Return this where every node can have whole groups of a layer's experts, else all ranks as one node."""
        divides = num_experts % self.num_groups == 0 and self.num_groups % self.num_nodes == 0
        if divides and self.num_ranks % self.num_nodes == 0 and self.num_slots % self.num_ranks == 0:
            return self
        return replace(self, num_nodes=1, num_groups=1)


def balanced_packing(weights: Sequence[float], capacities: Sequence[int]) -> list[list[int]]:
    """Return the items of every pack, whose number is its capacity: the heaviest item goes first, to the lightest pack.

    Among equals the first item and the first pack come first. Raises ValueError: capacities do not fit the items.
    """
    if sum(capacities) != len(weights):
        raise ValueError(f"capacities: expected {len(weights)} places in all, got {sum(capacities)}")
    packs: list[list[int]] = [[] for _ in capacities]
    totals = [0.0] * len(capacities)
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        open_packs = [p for p, capacity in enumerate(capacities) if len(packs[p]) < capacity]
        lightest = min(open_packs, key=totals.__getitem__)
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs


def replicated(loads: Loads, num_slots: int) -> list[int]:
    """Return the expert of every slot: each once, then again and again that with the most load per copy.

    Raises ValueError: fewer slots than experts.
    """
    if num_slots < len(loads):
        raise ValueError(f"num_slots: expected at least one per expert ({len(loads)}), got {num_slots}")
    copies = np.ones(len(loads))
    experts = list(range(len(loads)))
    while len(experts) < num_slots:
        expert = int(np.argmax(loads / copies))
        experts.append(expert)
        copies[expert] += 1
    return experts


def balanced_placement(loads: Loads, shape: ExpertGroupShape) -> list[list[int]]:
    """Return the experts of every rank's slots in one layer.

    Where nodes can have whole groups of experts, they do: groups are packed into nodes, copied inside them, and the
    copies are packed into a node's ranks. Else all ranks are one node.

    Args:
        loads: [E] rows of each expert.

    Raises ValueError: as `replicated`.
    """
    shape = shape.of_layer(len(loads))
    num_nodes, num_groups = shape.num_nodes, shape.num_groups
    of_groups = np.arange(len(loads)).reshape(num_groups, -1)
    nodes = balanced_packing(loads[of_groups].sum(axis=1).tolist(), [num_groups // num_nodes] * num_nodes)
    capacities, per_node = shape.slots_of(), shape.num_ranks // num_nodes
    placement: list[list[int]] = []
    for node, groups in enumerate(nodes):
        experts = of_groups[groups].ravel()
        of_ranks = capacities[node * per_node : (node + 1) * per_node]
        slots = np.array(replicated(loads[experts], sum(of_ranks)))
        copies = np.bincount(slots)
        packs = balanced_packing((loads[experts] / copies)[slots].tolist(), of_ranks)
        placement += [experts[slots[pack]].tolist() for pack in packs]
    return placement


def rank_loads(loads: Loads, placement: Sequence[Sequence[int]]) -> Loads:
    """Return [num_ranks]: the load of each rank in a layer, where an expert's rows are shared by its copies."""
    copies = np.bincount(np.concatenate([np.array(experts, np.int64) for experts in placement]), minlength=len(loads))
    per_copy = loads / np.maximum(copies, 1)
    return np.array([per_copy[list(experts)].sum() for experts in placement])


def balancedness(of_ranks: Loads) -> float:
    """Return the mean load of ranks by the greatest, 1 where all are equal or idle."""
    greatest = float(of_ranks.max())
    return min(float(of_ranks.mean()) / greatest, 1.0) if greatest > 0 else 1.0  # the mean of equals may round up


def slot_table(placement: Sequence[Sequence[int]], num_slots: int) -> I32:
    """Return i32[num_ranks, num_slots]: the experts of a layer's slots, -1 = none."""
    table = np.full((len(placement), num_slots), -1, np.int32)
    for rank, experts in enumerate(placement):
        table[rank, : len(experts)] = experts
    return table
