"""A step's memory as the plan and the request table have it, whatever was in it before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.device.step_memory import StepLimits
from fastdeploy_sd.ops.reference.batch import BatchMaps, Tables, prepare_batch
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import DraftTokens, offsets
from tests.unit.worker.steps import BLOCK_SIZE, NUM_DRAFTS, Steps, new
from tests.values import i32


def assert_is_what_the_reference_builds(steps: Steps, names: tuple[str, ...], drafts: list[list[int]]) -> None:
    step, table = steps.plan(names, drafts), steps.table
    steps.batches.build(step)
    tables = Tables(table.tokens, table.num_tokens, table.blocks)
    counts = step.num_computed_tokens, step.num_new_tokens
    maps = prepare_batch(tables, table.table_rows(names), *counts, step.draft, BLOCK_SIZE)
    for name, expected in maps._asdict().items():
        np.testing.assert_array_equal(getattr(steps.memory, name)[: len(expected)], expected, err_msg=name)
    m = steps.memory
    assert (m.num_requests, m.num_tokens, m.num_logits) == (len(names), len(maps.input_ids), len(maps.logits_indices))


def test_steps_share_memory_and_every_one_is_what_the_reference_builds() -> None:
    """Other requests, more blocks, more and fewer drafts: nothing of an earlier step is left."""
    steps = Steps(new("a", 4), new("b", 3), new("c", 7))
    for name, *block_ids in (("a", 6, 7), ("b", 8, 9), ("c", 10, 11)):
        steps.grow(name, *block_ids)
    runs: list[tuple[tuple[str, ...], list[list[int]]]] = [
        (("a", "b"), [[], []]),
        (("c", "a", "b"), [[5, 6, 7, 8], [], [9]]),
        (("b",), [[1, 2]]),
        (("a", "b"), [[], [3]]),
    ]
    for names, drafts in runs:
        assert_is_what_the_reference_builds(steps, names, drafts)
        outputs = [[r] for r in range(len(names))]
        steps.commit(outputs)
        rows = steps.table.table_rows(names)
        assert [[int(steps.table.tokens[s, steps.table.num_tokens[s] - 1])] for s in rows] == outputs


def test_no_address_changes() -> None:
    steps = Steps(new("a", 4), new("b", 3))
    steps.grow("a", 7)
    arrays = {name: value for name, value in vars(steps.memory).items() if isinstance(value, np.ndarray)}
    assert arrays.keys() > set(BatchMaps._fields)
    for names in (("a",), ("a", "b"), ("b",)):
        steps.run(names, [[1]] * len(names), [1] * len(names))
        assert all(getattr(steps.memory, name) is array for name, array in arrays.items())


@pytest.mark.parametrize(
    ("num_new", "drafts", "text"),
    [
        ((1,) * 5, [[]] * 5, "request_ids: expected at most 4, got 5"),
        ((2,), [[1] * 17], "draft.token_ids: expected at most 16, got 17"),
        ((17,), [[]], "num_new: expected at most max_num_tokens together, got more"),
    ],
)
def test_a_plan_beyond_the_limits_is_refused(num_new: tuple[int, ...], drafts: list[list[int]], text: str) -> None:
    steps, n = Steps(new("a", 20)), len(num_new)
    draft = DraftTokens(i32(*(token for d in drafts for token in d)), offsets([len(d) for d in drafts]))
    step = replace(
        steps.plan(("a",)),
        request_ids=("a",) * n,
        num_computed_tokens=i32(*[0] * n),
        num_new_tokens=i32(*num_new),
        draft=draft,
        max_draft_len=i32(*[0] * n),
    )
    with pytest.raises(ValueError, match=text):
        steps.batches.build(step)


def test_forbidden_tokens_are_those_of_the_step() -> None:
    """min_tokens forbids the end only while too few tokens are out; no other request's row is touched."""
    steps = Steps(new("plain", 2), new("a", 2, SamplingParams(min_tokens=1)))
    m = steps.prepare(("plain", "a"))
    assert (m.cu_mask[:3].tolist(), m.mask_token_ids[:1].tolist()) == ([0, 0, 1], [3])
    steps.commit([[5], [6]])
    steps.prepare(("plain", "a"))
    assert m.cu_mask[:3].tolist() == [0, 0, 0]


def test_forbidden_tokens_of_a_node_are_those_after_its_path() -> None:
    steps = Steps(new("a", 2, SamplingParams(min_tokens=2)))
    steps.grow("a", 7)
    plan = steps.plan(("a",), [[5, 6, 7]])
    steps.batches.build(replace(plan, draft=replace(plan.draft, parents=i32(-1, -1, 1))))
    assert steps.memory.cu_mask[:5].tolist() == [0, 1, 2, 3, 3]


def test_the_same_id_may_be_another_request() -> None:
    steps = Steps(new("a", 2, SamplingParams(temperature=0.5)))
    added = new("a", 2, SamplingParams(temperature=0.25, logit_bias={7: 1.5}))
    steps.table.apply(replace(steps.plan(("a",)), new=(added,), finished_ids=("a",)))
    m, sampling = steps.prepare(("a",)), steps.table.sampling(steps.memory)
    row = m.table_rows[0]
    assert (sampling.temperature[row], sampling.num_bias[row]) == (0.25, 1)
    assert (sampling.bias_token_ids[row, 0], sampling.bias_values[row, 0]) == (7, 1.5)


def test_a_request_that_was_dropped_is_in_no_step_any_more() -> None:
    steps = Steps(new("a", 2))
    step = steps.plan(("a",))
    steps.table.drop(["a"])
    with pytest.raises(KeyError):
        steps.batches.build(step)


def test_limits_say_how_many_rows_of_logits_there_are() -> None:
    steps = Steps(new("a", 2))
    assert steps.memory.limits.num_logits == 16, "every row of logits is a token of the step"
    assert steps.memory.limits.num_drafts == 4 * NUM_DRAFTS
    assert StepLimits(4, 16, 9).num_drafts == 16, "and so is every draft"
