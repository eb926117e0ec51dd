"""Decides which rank shall have which experts, from the rows that each expert has had lately."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.device.expert_service import ExpertService
from fastdeploy_sd.distributed.expert_balance import (
    ExpertGroupShape,
    Loads,
    balanced_placement,
    balancedness,
    rank_loads,
    slot_table,
)

logger = logging.getLogger(__name__)

# A placement must be so much better to be worth its moves.
_LEAST_GAIN = 0.05
_ANY_GAIN = 1e-6
# Rows per expert, on average, before what they say is more than chance.
_LEAST_ROWS = 100


def next_sets(now: Sequence[set[int]], goal: Sequence[set[int]], num_slots: int) -> list[set[int]]:
    """Return the experts that ranks shall have next on the way to a goal; `now` where nothing can change.

    Ranks first free what others have too, then take what they miss. An expert is never without a rank.

    Args:
        now, goal: of each rank, of at most num_slots experts; every expert is in both.
    """
    found = [set(own) for own in now]
    for own, wanted in zip(found, goal, strict=True):
        for expert in sorted(own - wanted):
            if sum(expert in other for other in found) > 1:
                own.discard(expert)
    if found != [set(own) for own in now]:
        return found
    for own, wanted in zip(found, goal, strict=True):
        # What another rank waits to free comes first.
        missing = sorted(wanted - own, key=lambda e: (not _is_left(e, now, goal), e))
        own.update(missing[: num_slots - len(own)])
    return found


def _is_left(expert: int, now: Sequence[set[int]], goal: Sequence[set[int]]) -> bool:
    return any(expert in own and expert not in wanted for own, wanted in zip(now, goal, strict=True))


def fitted(goal: Sequence[set[int]], now: Sequence[set[int]], num_nodes: int = 1) -> list[set[int]]:
    """Return the sets of a goal, each given to the rank that has most of it already; those of a node to one node."""
    if num_nodes == 1:
        return [goal[i] for i in _nearest(goal, now)]
    size = len(now) // num_nodes
    goals, nows = ([sets[i : i + size] for i in range(0, len(sets), size)] for sets in (goal, now))
    order = _nearest([set().union(*sets) for sets in goals], [set().union(*sets) for sets in nows])
    return [own for i, sets in zip(order, nows, strict=True) for own in fitted(goals[i], sets)]


def _nearest(goal: Sequence[set[int]], now: Sequence[set[int]]) -> list[int]:
    """Return for each set of `now` the number of a set of the goal, each once; those with most in common first."""
    places = range(len(now))
    common = sorted(((len(goal[i] & now[place]), -place, -i) for place in places for i in places), reverse=True)
    found: dict[int, int] = {}
    for _, place, i in common:
        if -place not in found and -i not in found.values():
            found[-place] = -i
    return [found[place] for place in places]


class ExpertPlanner:
    """Sets goals for all ranks, on one of them.

    Args:
        num_redundant: slots of a layer besides one for each expert.
        interval_s: between two decisions.
        num_hosts: of the ranks, as many on each, one host's after another's.

    Attributes:
        num_ordered: copies of experts that ranks were told to take.
    """

    def __init__(self, service: ExpertService, num_redundant: int, interval_s: float, num_hosts: int = 1) -> None:
        self._service, self._num_redundant, self._num_hosts = service, num_redundant, num_hosts
        self._layers = {number: layer.num_experts for number, layer in service.layers.items()}
        self._interval_s = interval_s
        self._counts = service.counts()
        self._goals: dict[int, list[set[int]]] = {}
        self._decides_at = time.monotonic() + interval_s
        self._is_asked = False
        self.num_ordered = 0

    def start(self) -> None:
        """Decide until the service is closed."""
        self._service.repeat(self._go_on, "expert planner")

    def ask(self) -> None:
        """Have it decide now, also by few rows and for a small gain. Any thread may call it."""
        self._is_asked = True

    @property
    def is_busy(self) -> bool:
        """Whether it was asked to decide, or layers have goals."""
        return self._is_asked or bool(self._goals)

    @property
    def num_moving(self) -> int:
        """Copies of experts that ranks were told to take and do not have yet."""
        layers = [(self._service.target(layer).tolist(), self._published(layer)) for layer in list(self._goals)]
        return sum(len(_experts(own) - now[rank]) for target, now in layers for rank, own in enumerate(target))

    def seek(self, layer: int, goal: list[set[int]]) -> None:
        """Have the ranks end with these experts, every one of the layer's on at least one of them."""
        self._goals[layer] = goal

    def decide(self, *, is_asked: bool = False) -> None:
        """Set a goal for every layer whose rows since the last decision were not balanced; `is_asked`: see `ask`."""
        least_rows, least_gain = (1, _ANY_GAIN) if is_asked else (_LEAST_ROWS, _LEAST_GAIN)
        counts, gains = self._service.counts(), list[tuple[float, float]]()
        for layer, num_experts in self._layers.items():
            rows = (counts[layer] - self._counts[layer])[:num_experts]
            if layer in self._goals or rows.sum() < least_rows * num_experts:
                continue
            self._counts[layer] = counts[layer]
            if (gain := self._decide(layer, rows.astype(np.float64), least_gain)) is not None:
                gains.append(gain)
        if gains:
            before, after = np.mean(gains, axis=0)
            text = "experts move in %d of %d layers: balancedness %.2f, then %.2f on average"
            logger.info(text, len(gains), len(self._layers), before, after)

    def follow(self) -> bool:
        """Bring layers one step nearer to their goals, where all ranks have made the last one; returns whether
        a layer has a goal.
        """
        for layer in list(self._goals):
            self._step(layer)
        return bool(self._goals)

    def _decide(self, layer: int, loads: Loads, least_gain: float) -> tuple[float, float] | None:
        """Set a goal if it is worth its moves; returns the balancedness before and after, None = it is not."""
        now = self._published(layer)
        num_ranks, num_groups = self._service.shape.num_ranks, self._service.layers[layer].num_groups
        shape = ExpertGroupShape(num_ranks, len(loads) + self._num_redundant, self._num_hosts, num_groups)
        shape = shape.of_layer(len(loads))
        goal = fitted([set(own) for own in balanced_placement(loads, shape)], now, shape.num_nodes)
        before, after = (balancedness(rank_loads(loads, [sorted(own) for own in sets])) for sets in (now, goal))
        if after < before + least_gain:
            return None
        self.seek(layer, goal)
        return before, after

    def _step(self, layer: int) -> None:
        now, table = self._published(layer), self._service.target(layer)
        if (table >= 0).any() and now != [_experts(own) for own in table.tolist()]:
            return
        found = next_sets(now, self._goals[layer], self._service.shape.num_slots)
        if found == now:
            del self._goals[layer]
        else:
            new = slot_table([sorted(own) for own in found], self._service.shape.num_slots)
            self._service.set_target(layer, new)
            # Only now: those on their way are subtracted from these.
            self.num_ordered += sum(len(after - before) for before, after in zip(now, found, strict=True))

    def _published(self, layer: int) -> list[set[int]]:
        return [_experts(own) for own in self._service.placement(layer).tolist()]

    def _go_on(self) -> None:
        is_asked = self._is_asked
        if not self.follow() and (is_asked or time.monotonic() >= self._decides_at):
            self.decide(is_asked=is_asked)
            self._is_asked = self._is_asked and not is_asked
            self._decides_at = time.monotonic() + self._interval_s


def _experts(own: Sequence[int]) -> set[int]:
    return {expert for expert in own if expert >= 0}
