"""Ranks reach a placement of experts by steps in which no expert is without a rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.distributed.expert_planner import fitted, next_sets
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
