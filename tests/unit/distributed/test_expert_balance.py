"""Placements of experts: they are complete, and spread load as the published algorithm does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_sd.distributed.expert_balance import (
    ExpertGroupShape,
    Loads,
    balanced_packing,
    balanced_placement,
    balancedness,
    rank_loads,
    replicated,
    slot_table,
)

# The example of the published repository: two layers of 12 experts in 4 groups, 16 slots on 8 ranks of 2 nodes.
EXAMPLE: dict[tuple[int, ...], list[int]] = {
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86): [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27): [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Loads, ExpertGroupShape]:
    """Loads of a layer, and what it is spread over."""
    num_experts = draw(st.integers(1, 40))
    num_ranks = draw(st.integers(1, 8))
    num_slots = draw(st.integers(max(num_experts, num_ranks), num_experts + 3 * num_ranks))
    shape = ExpertGroupShape(num_ranks, num_slots, draw(st.integers(1, 3)), draw(st.integers(1, 6)))
    loads = draw(st.lists(st.integers(0, 10**6), min_size=num_experts, max_size=num_experts))
    return np.array(loads, np.float64), shape


@pytest.mark.parametrize("loads", EXAMPLE)
def test_the_published_example_has_its_published_result(loads: tuple[int, ...]) -> None:
    placement = balanced_placement(np.array(loads, np.float64), ExpertGroupShape(8, 16, num_nodes=2, num_groups=4))
    assert [expert for experts in placement for expert in experts] == EXAMPLE[loads]


@given(cases())
def test_every_expert_has_a_slot_and_every_slot_an_expert(case: tuple[Loads, ExpertGroupShape]) -> None:
    loads, shape = case
    placement = balanced_placement(loads, shape)
    assert [len(experts) for experts in placement] == shape.slots_of()
    assert {expert for experts in placement for expert in experts} == set(range(len(loads)))


@given(cases())
def test_all_load_is_somewhere(case: tuple[Loads, ExpertGroupShape]) -> None:
    loads, shape = case
    of_ranks = rank_loads(loads, balanced_placement(loads, shape))
    assert of_ranks.sum() == pytest.approx(loads.sum())
    assert 0 < balancedness(of_ranks) <= 1


@given(cases())
def test_groups_of_experts_stay_on_one_node(case: tuple[Loads, ExpertGroupShape]) -> None:
    loads, shape = case
    num_experts = len(loads)
    if num_experts % shape.num_groups or shape.num_groups % shape.num_nodes:
        return
    if shape.num_ranks % shape.num_nodes or shape.num_slots % shape.num_ranks:
        return
    nodes_of: dict[int, set[int]] = {}
    for rank, experts in enumerate(balanced_placement(loads, shape)):
        for expert in experts:
            group = expert // (num_experts // shape.num_groups)
            nodes_of.setdefault(group, set()).add(rank // (shape.num_ranks // shape.num_nodes))
    assert all(len(nodes) == 1 for nodes in nodes_of.values())


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(0, 10))
def test_copies_go_to_the_greatest_load_per_copy(loads: list[int], num_more: int) -> None:
    """No expert has a copy more while another one, without it, has more load per copy."""
    array = np.array(loads, np.float64)
    copies = np.bincount(replicated(array, len(loads) + num_more))
    assert copies.sum() == len(loads) + num_more
    for expert in np.flatnonzero(copies > 1):
        assert array[expert] / (copies[expert] - 1) >= (array / copies).max()


def test_among_equals_the_first_come_first() -> None:
    assert balanced_packing([1, 1, 1, 1], [2, 2]) == [[0, 2], [1, 3]]
    assert replicated(np.array([5.0, 5.0, 1.0]), 5) == [0, 1, 2, 0, 1]


def test_skewed_load_is_spread_by_copies() -> None:
    """One expert of 16 gets half of the rows: its rank has more than 4 times the mean, and with copies hardly more."""
    loads = np.ones(16)
    loads[3] = 15
    linear = [list(range(first, first + 2)) for first in range(0, 16, 2)]
    assert balancedness(rank_loads(loads, linear)) < 0.25
    assert balancedness(rank_loads(loads, balanced_placement(loads, ExpertGroupShape(8, 24)))) > 0.8


def test_equal_loads_are_balanced_though_their_mean_rounds_up() -> None:
    assert balancedness(np.full(7, 99488 / 7)) == 1


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_slots: expected at least one per expert \(3\), got 2"):
        replicated(np.ones(3), 2)
    with pytest.raises(ValueError, match="capacities: expected 3 places in all, got 2"):
        balanced_packing([1, 2, 3], [1, 1])


def test_a_table_of_slots_has_no_expert_where_a_rank_has_fewer() -> None:
    assert slot_table([[4, 1], [2]], 2).tolist() == [[4, 1], [2, -1]]
