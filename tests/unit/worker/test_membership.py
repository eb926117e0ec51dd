"""What is gathered once per membership: kept while the same requests run, and never longer than it is true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.ops.reference.batch import prepare_batch
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import DraftTokens, NewRequest, Request, RequestDelta, SchedulerOutput, VerifyResult
from fastdeploy_sd.worker.batch import BatchBuilder, BatchRows
from fastdeploy_sd.worker.request_state import RequestTable

BLOCK_SIZE, VOCAB = 4, 11


def new(name: str, num_tokens: int, sampling: SamplingParams | None = None, seed: int = 1) -> NewRequest:
    tokens, blocks = np.arange(num_tokens, dtype=np.int32), tuple(range(-(-num_tokens // BLOCK_SIZE)))
    request = Request(name, tokens, sampling or SamplingParams(), 9, seed, eos_token_ids=(3,))
    return NewRequest(request, tokens, num_tokens, blocks)


def plan(
    table: RequestTable,
    *names: str,
    added: tuple[NewRequest, ...] = (),
    dropped: tuple[str, ...] = (),
    deltas: tuple[RequestDelta, ...] = (),
) -> SchedulerOutput:
    """Every request runs its last token."""
    known = {new.request.request_id: len(new.token_ids) for new in added}
    num_tokens = [known[name] if name in known else int(table.num_tokens[table.slots([name])[0]]) for name in names]
    rows = np.ones(len(names), np.int32)
    computed = np.array(num_tokens, np.int32) - 1
    return SchedulerOutput(0, names, added, deltas, computed, rows, DraftTokens.none(len(rows)), rows, dropped)


def table_of(*added: NewRequest) -> RequestTable:
    table = RequestTable(4, 32, BLOCK_SIZE, VOCAB)
    table.apply(plan(table, *(a.request.request_id for a in added), added=added))
    return table


def test_members_are_gathered_once_as_long_as_they_stay() -> None:
    table = table_of(new("a", 2), new("b", 3))
    members = table.members(("a", "b"))
    table.apply(plan(table, "a", "b"))
    assert table.members(("a", "b")) is members
    assert table.members(("b", "a")).slots.tolist() == members.slots.tolist()[::-1]


def test_the_same_id_of_another_request_is_another_member() -> None:
    table = table_of(new("a", 2, SamplingParams(temperature=0.5)))
    assert table.members(("a",)).unmasked_sampling(1).temperature.tolist() == [0.5]
    table.apply(plan(table, "a", added=(new("a", 2, SamplingParams(temperature=0.25)),), dropped=("a",)))
    assert table.members(("a",)).unmasked_sampling(1).temperature.tolist() == [0.25]


def test_a_request_that_was_dropped_is_no_member_any_more() -> None:
    table = table_of(new("a", 2))
    table.members(("a",))
    table.drop(["a"])
    with pytest.raises(KeyError):
        table.members(("a",))


def test_block_tables_grow_with_their_requests() -> None:
    table = table_of(new("a", 4), new("b", 3))
    members = table.members(("a", "b"))
    assert table.block_tables(members).tolist() == [[0], [0]]
    assert table.block_tables(members) is table.block_tables(members)
    step = plan(table, "a", "b", deltas=(RequestDelta("a", (7,)),))
    table.apply(step)
    assert table.block_tables(table.members(("a", "b"))).tolist() == [[0, 7], [0, -1]]
    table.commit(members, VerifyResult(np.array([5], np.int32), np.array([0, 1, 1], np.int32), np.zeros(2, np.int32)))
    assert BatchBuilder(table, BLOCK_SIZE).build(plan(table, "a", "b"), members).slot_mapping.tolist() == [28, 2]


def test_a_batch_is_what_the_reference_builds() -> None:
    table = table_of(new("a", 4), new("b", 3), new("c", 7))
    step = plan(table, "c", "a", "b")
    batch = BatchBuilder(table, BLOCK_SIZE).build(step, table.members(step.request_ids))
    slots = table.slots(step.request_ids)
    blocks = table.blocks[slots, : batch.block_tables.shape[1]]
    rows = BatchRows(step.num_computed_tokens, step.num_new_tokens, table.num_tokens[slots], slots, step.draft, blocks)
    for name, expected in prepare_batch(rows, table.tokens, BLOCK_SIZE)._asdict().items():
        np.testing.assert_array_equal(getattr(batch, name), expected, err_msg=name)


def test_forbidden_tokens_are_those_of_the_step() -> None:
    """min_tokens forbids the end only while too few tokens are out; nobody else's row is touched."""
    table = table_of(new("plain", 2), new("a", 2, SamplingParams(min_tokens=1)))
    members = table.members(("plain", "a"))
    first = BatchBuilder(table, BLOCK_SIZE).build(plan(table, "plain", "a"), members).sampling
    assert (first.cu_mask.tolist(), first.mask_token_ids.tolist()) == ([0, 0, 1], [3])
    table.commit(
        members, VerifyResult(np.array([5, 6], np.int32), np.array([0, 1, 2], np.int32), np.zeros(2, np.int32))
    )
    second = BatchBuilder(table, BLOCK_SIZE).build(plan(table, "plain", "a"), members).sampling
    assert (second.cu_mask.tolist(), second.mask_token_ids.tolist()) == ([0, 0, 0], [])


def test_without_rules_the_parameters_are_the_same_object_in_every_step() -> None:
    table = table_of(new("a", 2), new("b", 2))
    members = table.members(("a", "b"))
    first, second = (BatchBuilder(table, BLOCK_SIZE).build(plan(table, "a", "b"), members) for _ in range(2))
    assert first.sampling is second.sampling
    assert first.sampling.cu_mask.tolist() == [0, 0, 0]


def test_steps_share_memory_and_every_one_is_what_the_reference_builds() -> None:
    """Other counts, more blocks, other requests and back: the Batch stays the same object only where it may."""
    table = table_of(new("a", 4), new("b", 3), new("c", 7))
    batches, last, num_same = BatchBuilder(table, BLOCK_SIZE), None, 0
    for i, names in enumerate([("a", "b")] * 3 + [("c", "a", "b")] * 2 + [("b",)] + [("a", "b")] * 2):
        deltas = (
            [RequestDelta(name, (first, first + 1)) for first, name in ((6, "a"), (8, "b"), (10, "c"))]
            if i == 0
            else []
        )
        step = plan(table, *names, deltas=tuple(deltas))
        step = replace(step, draft=last.draft) if last is not None and len(last.seq_lens) == len(names) else step
        table.apply(step)
        members = table.members(names)
        batch = batches.build(step, members)
        num_same += batch is last
        slots = table.slots(names)
        counts = (step.num_computed_tokens, step.num_new_tokens, table.num_tokens[slots])
        expected = prepare_batch(BatchRows(*counts, slots, step.draft, batch.block_tables), table.tokens, BLOCK_SIZE)
        for name, column in expected._asdict().items():
            np.testing.assert_array_equal(getattr(batch, name), column, err_msg=f"step {i} {name}")
        output = np.arange(len(names), dtype=np.int32)
        cu_num_output = np.arange(len(names) + 1, dtype=np.int32)
        table.commit(members, VerifyResult(output, cu_num_output, np.zeros(len(names), np.int32)))
        assert [int(table.tokens[s, table.num_tokens[s] - 1]) for s in slots] == output.tolist()
        last = batch
    assert num_same == 4


def test_drafts_of_step_after_step_are_judged_in_the_same_batch() -> None:
    """Only what is in its arrays changes, and never what the plans hold."""
    table = table_of(new("a", 4), new("b", 3))
    members, batches = table.members(("a", "b")), BatchBuilder(table, BLOCK_SIZE)
    given = [
        DraftTokens(np.array(ids, np.int32), np.array(cu, np.int32))
        for ids, cu in (((5, 6), (0, 1, 2)), ((7, 8), (0, 2, 2)), ((9,), (0, 0, 1)))
    ]
    seen = []
    table.apply(plan(table, "a", "b", deltas=(RequestDelta("a", (6,)), RequestDelta("b", (7,)))))
    for draft in given:
        step = plan(table, "a", "b")
        num_new = step.num_new_tokens + np.diff(draft.cu_num_draft)
        batch = batches.build(replace(step, draft=draft, num_new_tokens=num_new), members)
        assert batch.draft.token_ids.tolist() == draft.token_ids.tolist()
        assert batch.cu_num_logits.tolist() == [0, *np.cumsum(num_new)]
        for r, begin in enumerate(batch.query_start_loc[:-1].tolist()):
            assert batch.input_ids[begin + 1 : begin + num_new[r]].tolist() == draft.row(r).tolist()
        seen.append(batch)
    assert seen[1] is seen[0]
    assert seen[2] is not seen[1]
    assert [draft.token_ids.tolist() for draft in given] == [[5, 6], [7, 8], [9]]
