"""What drafting methods are shown after a step: committed tokens, and how many drafts may follow them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import I32, Batch, VerifyResult
from fastdeploy_sd.worker.batch import BatchBuilder
from fastdeploy_sd.worker.draft_inputs import DraftInputs
from fastdeploy_sd.worker.request_state import RequestTable
from tests.unit.worker.test_membership import BLOCK_SIZE, new, plan, table_of

HIDDEN: Any = object()


def i32(*values: int) -> I32:
    return np.array(values, np.int32)


def two_requests() -> RequestTable:
    """With 4 and 3 tokens, and blocks for 16."""
    return table_of(*(replace(new(name, n), block_ids=(0, 1, 2, 3)) for name, n in (("a", 4), ("b", 3))))


class Steps:
    """A worker without a model: every step's output is given."""

    def __init__(self, table: RequestTable, *, has_target: bool) -> None:
        self.table, self.batches = table, BatchBuilder(table, BLOCK_SIZE)
        self.inputs = DraftInputs(table, BLOCK_SIZE, has_target=has_target)
        self.batch: Batch

    def run(self, names: tuple[str, ...], outputs: list[list[int]], planned: list[int]) -> ProposeInput:
        step = replace(plan(self.table, *names), max_draft_len=i32(*planned))
        members = self.table.members(names)
        self.batch = self.batches.build(step, members)
        token_ids = i32(*(token for output in outputs for token in output))
        cu_num_output = i32(0, *np.cumsum([len(output) for output in outputs]))
        verified = VerifyResult(token_ids, cu_num_output, np.zeros(len(names), np.int32))
        self.table.commit(members, verified)
        return self.inputs.build(step, members, self.batch, verified, HIDDEN)


def test_drafts_leave_room_for_the_token_behind_them() -> None:
    """max_total is 9 more than the prompt; a failed row gets none whatever was planned."""
    steps = Steps(two_requests(), has_target=False)
    x = steps.run(("a", "b"), [[5], []], [4, 4])
    assert (x.num_tokens.tolist(), x.max_draft_len.tolist()) == ([5, 3], [4, 0])
    x = steps.run(("a", "b"), [[5] * 4, [6]], [4, 2])
    assert (x.num_tokens.tolist(), x.max_draft_len.tolist()) == ([9, 4], [3, 2])
    x = steps.run(("a", "b"), [[5] * 4, [6]], [4, 0])
    assert (x.num_tokens.tolist(), x.max_draft_len.tolist()) == ([13, 5], [0, 0])


def test_the_same_requests_get_the_same_object() -> None:
    steps = Steps(two_requests(), has_target=False)
    x = steps.run(("a", "b"), [[5], [6]], [1, 1])
    assert steps.run(("a", "b"), [[5], [6]], [2, 1]) is x
    assert (x.max_draft_len.tolist(), x.target) == ([2, 1], None)
    y = steps.run(("b",), [[6]], [3])
    assert (y.request_ids, y.num_tokens.tolist(), y.max_draft_len.tolist()) == (("b",), [6], [3])
    assert y.slots.tolist() == steps.table.slots(["b"]).tolist()


def test_a_method_that_runs_a_model_sees_what_was_run() -> None:
    steps = Steps(two_requests(), has_target=True)
    for num_valid in (4, 5):
        target = steps.run(("a", "b"), [[5], []], [1, 1]).target
        assert target is not None
        assert (target.num_valid.tolist(), target.num_kv_slots.tolist()) == ([num_valid, 2], [16, 16])
        assert target.query_start_loc is steps.batch.query_start_loc
        assert target.hidden is HIDDEN
