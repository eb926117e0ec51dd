"""What a step does with recurrent states: where they begin, what is repeated, which snapshots it reaches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.types import LIVE_STATE, NO_STATE, DraftTokens, NewRequest, SchedulerOutput, StatePlan, offsets
from fastdeploy_sd.worker.step.request_table import RequestTable
from fastdeploy_sd.worker.step.state_rows import StateRows
from tests.unit.worker.steps import BLOCK_SIZE, VOCAB, new
from tests.values import i32

NUM_ROWS, NUM_SNAPSHOTS = 4, 3


class States:
    """Requests of a table, and what their steps do with states."""

    def __init__(self, *added: NewRequest) -> None:
        self.table = RequestTable(NUM_ROWS, 64, BLOCK_SIZE, VOCAB)
        self.memory = StepMemory(StepLimits(NUM_ROWS, 64, 4), VOCAB, NUM_SNAPSHOTS)
        self.rows = StateRows(self.table, self.memory)
        self.names = tuple(a.request.request_id for a in added)
        none = np.zeros(len(added), np.int32)
        self.table.apply(SchedulerOutput(0, self.names, added, (), none, none, DraftTokens.none(len(added)), none))

    def build(
        self, computed: list[int], num_new: list[int], num_drafts: list[int], states: StatePlan | None = None
    ) -> list[tuple[int, ...]]:
        """Source, repeated and certain rows of each request of a step whose rows of logits are its newest token's."""
        m, n = self.memory, len(computed)
        m.num_requests = n
        m.table_rows[:n] = self.table.table_rows(self.names[:n])
        m.num_computed[:n], m.num_new[:n] = computed, num_new
        m.cu_num_draft[: n + 1] = offsets(num_drafts)
        m.cu_num_logits[: n + 1] = offsets([count + 1 for count in num_drafts])
        draft = DraftTokens(np.zeros(sum(num_drafts), np.int32), offsets(num_drafts))
        none = np.zeros(n, np.int32)
        counts = i32(*computed), i32(*num_new)
        self.rows.build(SchedulerOutput(0, self.names[:n], (), (), *counts, draft, none, states=states))
        columns = (m.state_source, m.num_replayed, m.num_certain)
        return [tuple(column.item(r) for column in columns) for r in range(n)]

    def row(self, name: str) -> int:
        return self.table.table_rows((name,)).item(0)


def plan(initial: list[int], snapshots: list[list[tuple[int, int]]] | None = None) -> StatePlan:
    of_rows = snapshots or [[] for _ in initial]
    ends, ids = ([pair[i] for row in of_rows for pair in row] for i in range(2))
    return StatePlan(i32(*initial), offsets([len(row) for row in of_rows]), i32(*ends), i32(*ids))


def test_a_state_moves_on_by_certain_tokens_and_repeats_the_accepted_drafts() -> None:
    s = States(new("a", 5))
    own = s.row("a")
    assert s.build([0], [5], [0]) == [(NO_STATE, 0, 5)]
    s.rows.commit()
    assert s.build([5], [4], [3]) == [(own, 0, 1)]  # one certain token, three drafts
    s.rows.commit()
    assert s.build([8], [1], [0]) == [(own, 2, 1)]  # two of them were accepted
    s.rows.commit()
    assert s.build([9], [1], [0]) == [(own, 0, 1)]


def test_a_step_that_failed_spoils_the_states_of_its_requests_only() -> None:
    s = States(new("a", 5), new("b", 5))
    s.build([0, 0], [5, 5], [0, 0])
    s.rows.commit()
    s.build([5], [1], [0])  # no commit: it failed
    with pytest.raises(ValueError, match="states: expected live ones, but a failed step has spoiled one"):
        s.build([5], [1], [0])
    s.names = ("b",)
    assert s.build([5], [1], [0]) == [(s.row("b"), 0, 1)]


@pytest.mark.parametrize("computed", [4, 8, 9])
def test_a_plan_that_contradicts_the_states_is_refused(computed: int) -> None:
    """The state has 6 tokens, and one draft after them."""
    s = States(new("a", 5))
    s.build([0], [5], [0])
    s.rows.commit()
    s.build([5], [2], [1])
    s.rows.commit()
    with pytest.raises(ValueError, match=r"num_computed_tokens: expected at most \[1\] accepted drafts after live"):
        s.build([computed], [1], [0])


def test_without_a_plan_a_request_begins_at_its_first_token() -> None:
    with pytest.raises(ValueError, match="num_computed_tokens: expected 0 without a state, got"):
        States(new("a", 5)).build([4], [1], [0])


def test_the_newest_token_of_a_request_with_a_grammar_is_kept_with_its_drafts() -> None:
    """So that it can run again, where the grammar's mask came too late."""
    guided = new("a", 5)
    s = States(replace(guided, request=replace(guided.request, grammar="{}")))
    own = s.row("a")
    assert s.build([0], [5], [0]) == [(NO_STATE, 0, 4)]
    s.rows.commit()
    assert s.build([4], [1], [0]) == [(own, 0, 0)]  # again
    s.rows.commit()
    assert s.build([5], [3], [2]) == [(own, 1, 0)]
    s.rows.commit()
    assert s.build([8], [1], [0]) == [(own, 3, 0)]


def test_snapshots_are_counted_in_rows_from_where_the_state_begins() -> None:
    s = States(new("a", 9), new("b", 9))
    first = plan([NO_STATE, 2], [[(4, 1), (8, 0)], []])
    assert s.build([0, 4], [6, 5], [0, 0], first) == [(NO_STATE, 0, 6), (NUM_ROWS + 2, 0, 5)]
    m = s.memory
    assert m.cu_snapshots[:3].tolist() == [0, 1, 1]  # the end at 8 comes later
    assert (m.snapshot_ends[0], m.snapshot_slots[0]) == (4, NUM_ROWS + 1)
    s.rows.commit()
    s.names = ("a",)
    s.build([6], [4], [3], plan([LIVE_STATE], [[(8, 0)]]))
    assert (m.cu_snapshots[1], m.snapshot_ends[0], m.snapshot_slots[0]) == (1, 2, NUM_ROWS)
    s.rows.commit()
    s.build([7], [4], [3], plan([LIVE_STATE], [[(8, 0)]]))  # no draft was accepted
    assert (m.cu_snapshots[1], m.snapshot_ends[0], m.snapshot_slots[0]) == (1, 1, NUM_ROWS)
