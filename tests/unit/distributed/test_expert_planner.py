"""Ranks reach a placement of experts by steps in which no expert is without a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.distributed.expert_planner import ExpertPlanner, fitted, next_sets
from fastdeploy_sd.models.sharding import spread_experts


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[set[int]], list[set[int]], int]:
    num_experts, num_ranks = draw(st.integers(4, 12)), draw(st.integers(2, 4))
    num_redundant = draw(st.integers(0, num_experts))
    now = spread_experts(num_experts, num_ranks, num_redundant)
    names = draw(st.permutations(range(num_experts)))
    order = draw(st.permutations(range(num_ranks)))
    goal = [{names[expert] for expert in now[rank]} for rank in order]
    return [set(own) for own in now], goal, max(map(len, now)) + 1


@given(cases())
def test_no_expert_is_ever_without_a_rank(case: tuple[list[set[int]], list[set[int]], int]) -> None:
    now, goal, num_slots = case
    every = set().union(*now)
    for _ in range(100):
        found = next_sets(now, goal, num_slots)
        assert set().union(*found) == every
        assert all(len(own) <= num_slots for own in found)
        # Ranks do a step in any order: what one frees, another one had before and keeps.
        assert set().union(*(a & b for a, b in zip(now, found, strict=True))) == every
        if found == now:
            break
        now = found
    assert found == now, "no end"


def test_what_belongs_to_one_node_goes_to_one_node() -> None:
    """The node that has most of it, and there the rank that has most."""
    now = [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    goal = [{5, 0}, {6, 4}, {2, 1}, {3, 7}]
    assert fitted(goal, now, num_nodes=2) == [{2, 1}, {3, 7}, {5, 0}, {6, 4}]
    assert fitted(goal, now) == [{5, 0}, {2, 1}, {6, 4}, {3, 7}]


def test_groups_that_the_router_chooses_together_stay_on_one_host() -> None:
    """And every host has as many of them, whatever their load."""
    layer, counts = SimpleNamespace(num_experts=8, num_groups=4), np.zeros((1, 8), np.int64)
    placement = np.array([[0, 1, -1], [2, 3, -1], [4, 5, -1], [6, 7, -1]], np.int32)
    service: Any = SimpleNamespace(
        shape=SimpleNamespace(num_ranks=4, num_slots=3),
        layers={0: layer},
        counts=lambda: counts,
        placement=lambda number: placement,
    )
    planner = ExpertPlanner(service, num_redundant=0, interval_s=1e9, num_hosts=2)
    planner.decide(is_asked=True)
    assert not planner.is_busy
    counts = np.array([[900, 700, 800, 600, 1, 1, 1, 1]])
    planner.decide(is_asked=True)
    assert planner.is_busy
    sets = planner._goals[0]
    hosts = [sets[0] | sets[1], sets[2] | sets[3]]
    assert all({e ^ 1 for e in own} == own for own in hosts)
    assert [len(own) for own in hosts] == [4, 4]
    assert not any({0, 2} <= own for own in hosts)


@given(cases())
def test_a_goal_is_reached_and_no_farther_than_it_must_be(case: tuple[list[set[int]], list[set[int]], int]) -> None:
    now, goal, num_slots = case
    near = fitted(goal, now)
    assert sorted(map(sorted, near)) == sorted(map(sorted, goal))
    best = max(len(own & wanted) for own in now for wanted in goal)
    assert any(len(own & wanted) == best for own, wanted in zip(now, near, strict=True))
    for _ in range(100):
        now = next_sets(now, near, num_slots)
    assert now == near
