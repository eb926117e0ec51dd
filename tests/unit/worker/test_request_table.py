"""The worker's columns of the running requests, driven by plans without a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import DraftTokens, NewRequest, Request, SchedulerOutput
from fastdeploy_sd.worker.step.batch import BatchBuilder
from fastdeploy_sd.worker.step.request_table import RequestTable
from fastdeploy_sd.worker.step.token_rules import TokenRules

VOCAB = 11
PENALISED = SamplingParams(frequency_penalty=0.5)


def new(name: str, token_ids: list[int], num_prompt: int, sampling: SamplingParams, max_tokens: int = 8) -> NewRequest:
    tokens = np.array(token_ids, np.int32)
    return NewRequest(Request(name, tokens[:num_prompt], sampling, max_tokens, seed=1), tokens, num_prompt, (0,))


def table_of(*requests: NewRequest) -> RequestTable:
    table, rows = RequestTable(4, 32, 16, VOCAB), np.ones(len(requests), np.int32)
    names = tuple(r.request.request_id for r in requests)
    table.apply(SchedulerOutput(0, names, requests, (), rows, rows, DraftTokens.none(len(rows)), rows))
    return table


def test_a_request_that_breaks_a_rule_is_refused_alone_and_leaves_nothing() -> None:
    bad = replace(PENALISED)
    object.__setattr__(bad, "top_p", 1e-50)  # as only a broken frontend has it
    rows = np.ones(5, np.int32)
    columns = [
        new("good", [1, 2], 2, PENALISED),
        new("bad", [1, 2], 2, bad),
        new("far", [VOCAB, 2], 2, PENALISED),
        new("long", [1, 2], 2, PENALISED, max_tokens=31),
        new("late", [3], 1, PENALISED),
    ]
    names = tuple(request.request.request_id for request in columns)
    table = RequestTable(4, 32, 16, VOCAB)
    changes = table.apply(SchedulerOutput(0, names, tuple(columns), (), rows, rows, DraftTokens.none(5), rows))
    assert [(n.request.request_id, table_row) for n, table_row in changes.added] == [("good", 0), ("late", 1)]
    assert {name: getattr(error, "param", None) for name, error in changes.refused.items()} == {
        "bad": "top_p", "far": "prompt_token_ids", "long": "max_tokens",
    }  # fmt: skip
    assert len(table._free) == 2
    assert sorted(table.count_rows[:2].tolist()) == [0, 1]
    # The plan after it drops what the engine has ended, known or not.
    end = SchedulerOutput(1, ("good",), (), (), rows[:1], rows[:1], DraftTokens.none(1), rows[:1], ("bad", "late"))
    assert table.apply(end).dropped.tolist() == [1]


def test_a_step_looks_for_what_somebody_wants_only() -> None:
    wants = SamplingParams(logprobs=3, min_tokens=4, stop_token_ids=(5,))
    table = table_of(new("plain", [1], 1, SamplingParams()), new("wants", [2], 1, wants))
    assert (table.num_reports, table.num_masks) == (1, 1)
    table.drop(["wants"])
    assert (table.num_reports, table.num_masks) == (0, 0)


def output_counts(table: RequestTable, name: str) -> dict[int, int]:
    """Token -> times in the output, as the kernels read them."""
    [table_row] = table.table_rows([name])
    counts = table.counts.table[table.count_rows[table_row]] & ((1 << 30) - 1)
    return {int(token): int(counts[token]) for token in np.flatnonzero(counts)}


def test_every_output_token_of_a_step_is_counted_in_its_own_row() -> None:
    table = table_of(
        new("a", [1, 2], 2, PENALISED), new("plain", [3], 1, SamplingParams()), new("b", [4, 5, 5], 1, PENALISED),
        new("prompt", [6], 1, PENALISED),
    )  # fmt: skip
    assert output_counts(table, "b") == {5: 2}, "it came back after preemption"
    names, memory = ("a", "plain", "b", "prompt"), StepMemory(StepLimits(4, 16, 3), VOCAB)
    memory.num_requests = 4
    memory.table_rows[:] = table.table_rows(names)
    memory.output_token_ids[:8] = [7, 7, 1, 9, 9, 5, 7, 5]
    memory.cu_num_output[:] = [0, 3, 5, 8, 8]
    BatchBuilder(table, memory).commit()
    assert output_counts(table, "a") == {7: 2, 1: 1}
    assert output_counts(table, "b") == {5: 4, 7: 1}
    assert output_counts(table, "prompt") == {}


def test_a_request_that_comes_back_has_the_same_limit() -> None:
    table = table_of(new("a", [1, 2, 3], 3, PENALISED, 8), new("back", [1, 2, 3, 4, 5], 3, PENALISED, 8))
    assert table.max_total[table.table_rows(["a", "back"])].tolist() == [11, 11]


def test_bad_words_are_found_by_the_token_before_their_last() -> None:
    words = ((6,), (1, 2), (3, 1, 4), (2, 5), (8,))
    request = Request("a", np.array([1], np.int32), SamplingParams(), 8, seed=1, bad_words_token_ids=words)
    rules = TokenRules.of(request, 1)
    assert rules.bad_tokens == {6, 8}
    assert rules.bad_words == {1: [(1, 2), (3, 1, 4)], 2: [(2, 5)]}
    assert rules.num_bad_prefix == 2
