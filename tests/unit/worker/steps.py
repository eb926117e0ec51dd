"""A worker without a model: a request table, a step's memory, and outputs that are given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.spec_decode.proposer import ProposeInput
from fastdeploy_sd.types import DraftTokens, NewRequest, Request, RequestDelta, SchedulerOutput, offsets
from fastdeploy_sd.worker.step.batch import BatchBuilder
from fastdeploy_sd.worker.step.draft_inputs import DraftInputs
from fastdeploy_sd.worker.step.request_table import RequestTable
from tests.values import i32

BLOCK_SIZE, VOCAB, NUM_DRAFTS = 4, 11, 4


def new(name: str, num_tokens: int, sampling: SamplingParams | None = None) -> NewRequest:
    tokens, blocks = np.arange(num_tokens, dtype=np.int32) % VOCAB, tuple(range(-(-num_tokens // BLOCK_SIZE)))
    request = Request(name, tokens, sampling or SamplingParams(), 9, seed=1, eos_token_ids=(3,))
    return NewRequest(request, tokens, num_tokens, blocks)


class Steps:
    """Every request of a step runs its last token and its drafts."""

    def __init__(self, *added: NewRequest, has_target: bool = False) -> None:
        self.table = RequestTable(4, 32, BLOCK_SIZE, VOCAB)
        self.memory = StepMemory(StepLimits(4, 16, NUM_DRAFTS), VOCAB)
        self.batches = BatchBuilder(self.table, self.memory)
        self.inputs = DraftInputs(self.table, self.memory, has_target=has_target)
        names = [a.request.request_id for a in added]
        rows = np.ones(len(names), np.int32)
        self.table.apply(SchedulerOutput(0, tuple(names), added, (), rows, rows, DraftTokens.none(len(rows)), rows))

    def plan(self, names: tuple[str, ...], drafts: list[list[int]] | None = None) -> SchedulerOutput:
        num_draft = i32(*(len(d) for d in drafts or [[]] * len(names)))
        draft = DraftTokens(i32(*(token for d in drafts or () for token in d)), offsets(num_draft))
        computed = self.table.num_tokens[self.table.table_rows(names)] - 1
        return SchedulerOutput(0, names, (), (), computed, num_draft + 1, draft, np.full_like(num_draft, NUM_DRAFTS))

    def grow(self, name: str, *block_ids: int) -> None:
        delta = RequestDelta(name, block_ids)
        self.table.apply(replace(self.plan((name,)), deltas=(delta,)))

    def prepare(self, names: tuple[str, ...], drafts: list[list[int]] | None = None) -> StepMemory:
        self.batches.build(self.plan(names, drafts))
        return self.memory

    def commit(self, outputs: list[list[int]]) -> None:
        token_ids = [token for output in outputs for token in output]
        self.memory.output_token_ids[: len(token_ids)] = token_ids
        self.memory.cu_num_output[: len(outputs) + 1] = offsets([len(output) for output in outputs])
        self.batches.commit()

    def run(self, names: tuple[str, ...], outputs: list[list[int]], planned: list[int]) -> ProposeInput:
        self.batches.build(replace(self.plan(names), max_draft_len=i32(*planned)))
        self.commit(outputs)
        return self.inputs.build(names)
