"""A drafted position gets the logits of plain decoding: whatever looks at the output sees the drafts before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.device.step_memory import StepLimits, StepMemory
from fastdeploy_sd.ops.sampling import process_logits
from fastdeploy_sd.sampling_params import SamplingParams
from fastdeploy_sd.types import DraftTokens, NewRequest, Request, SchedulerOutput
from fastdeploy_sd.worker.step.batch import BatchBuilder
from fastdeploy_sd.worker.step.request_table import RequestTable

VOCAB, BLOCK_SIZE, MAX_MODEL_LEN = 23, 16, 64
NUM_DRAFTS = 8
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.4},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": (3, 9)},
    "bias": {"logit_bias": {4: 2.5, 8: -1.0}},
    "all": {
        "repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 1.1, "min_tokens": 7,
        "logit_bias": {1: 3.0},
    },
}  # fmt: skip
# One token; what the end of the prompt begins; what only drafts begin; a token twice; what two prompt tokens begin.
BAD_WORDS = ((6,), (5, 4), (2, 7, 1), (7, 7), (1, 5, 8))
LONGER_THAN_ANY_HISTORY = tuple(range(20)) * 2


def requests_of(rule: dict[str, Any], bad_words: tuple[tuple[int, ...], ...]) -> list[Request]:
    """The request under test between two others, one of them without any rule."""
    other = SamplingParams(presence_penalty=1.0, min_tokens=3, stop_token_ids=(2,))
    return [
        Request("before", np.array([7, 7, 1], np.int32), other, 40, seed=1, bad_words_token_ids=((7, 2), (7,))),
        Request(
            "tested", np.array([3, 1, 5], np.int32), SamplingParams(**rule), 40, seed=2, eos_token_ids=(2,),
            bad_words_token_ids=bad_words,
        ),
        Request("after", np.array([9], np.int32), SamplingParams(), 40, seed=3),
    ]  # fmt: skip


class Worker:
    """A request table driven by hand, without a model."""

    def __init__(self, requests: list[Request]) -> None:
        self._table = RequestTable(len(requests), MAX_MODEL_LEN, BLOCK_SIZE, VOCAB)
        self._memory = StepMemory(StepLimits(len(requests), 64, NUM_DRAFTS), VOCAB)
        self._batches = BatchBuilder(self._table, self._memory)
        self._ids = tuple(request.request_id for request in requests)
        blocks = MAX_MODEL_LEN // BLOCK_SIZE
        new = tuple(
            NewRequest(request, request.prompt_token_ids, len(request.prompt_token_ids), tuple(range(blocks)))
            for request in requests
        )
        self._table.apply(self._plan([()] * len(requests), new))

    def _plan(self, drafts: list[tuple[int, ...]], new: tuple[NewRequest, ...] = ()) -> SchedulerOutput:
        num_draft = np.array([len(d) for d in drafts], np.int32)
        known = self._table.num_tokens[self._table.table_rows(self._ids)] if not new else num_draft + 1
        flat = np.array([token for d in drafts for token in d], np.int32)
        cu_num_draft = np.concatenate([[0], np.cumsum(num_draft)]).astype(np.int32)
        return SchedulerOutput(
            step_id=0,
            request_ids=self._ids,
            new=new,
            deltas=(),
            num_computed_tokens=(known - 1).astype(np.int32),
            num_new_tokens=num_draft + 1,
            draft=DraftTokens(flat, cu_num_draft),
            max_draft_len=np.zeros_like(num_draft),
        )

    def prepare(self, drafts: list[tuple[int, ...]]) -> StepMemory:
        self._batches.build(self._plan(drafts))
        return self._memory

    def processed_rows(self, drafts: list[tuple[int, ...]], logits: np.ndarray) -> np.ndarray:
        """f32[rows, V] of the request under test; its row j has the raw logits of `logits[j]`."""
        m = self.prepare(drafts)
        begin, end = m.cu_num_logits[1:3].tolist()
        raw = np.zeros((len(m.cu_mask) - 1, VOCAB), np.float32)
        raw[begin:end] = logits[: end - begin]
        cu_num_logits, cu_num_draft = m.cu_num_logits.copy(), m.cu_num_draft.copy()
        sampling = self._table.sampling(m)
        num_rows = m.num_logits
        sampling = replace(
            sampling, cu_mask=m.cu_mask[: num_rows + 1].copy(), allowed_rows=m.allowed_rows[:num_rows].copy()
        )
        rows = np.arange(begin, end, dtype=np.int32)
        return process_logits(
            raw[:num_rows], rows, cu_num_logits, DraftTokens(m.draft_token_ids, cu_num_draft), sampling
        )

    def commit(self, token: int) -> None:
        """One output token for the request under test."""
        m = self._memory
        m.num_requests = 3
        m.table_rows[:] = self._table.table_rows(self._ids)
        m.output_token_ids[0], m.cu_num_output[:] = token, [0, 0, 1, 1]
        self._batches.commit()


@pytest.mark.parametrize("bad_words", [(), BAD_WORDS, (*BAD_WORDS, LONGER_THAN_ANY_HISTORY)])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_output", [0, 2])
def test_row_j_is_plain_decoding_after_the_first_j_drafts(
    name: str, bad_words: tuple[tuple[int, ...], ...], num_output: int
) -> None:
    rng = np.random.default_rng(21)
    logits = rng.standard_normal((NUM_DRAFTS + 1, VOCAB)).astype(np.float32)
    for drafts in ((2, 7, 7, 1, 2, 7, 5, 4), (1, 1, 1, 1, 1, 1, 1, 1), tuple(rng.integers(0, VOCAB, NUM_DRAFTS))):
        requests = requests_of(RULES[name], bad_words)
        plain, drafted = Worker(requests), Worker(requests)
        for token in (5, 5)[:num_output]:
            plain.commit(token)
            drafted.commit(token)
        rows = drafted.processed_rows([(1, 7), drafts, ()], logits)
        assert len(rows) == NUM_DRAFTS + 1
        for j in range(NUM_DRAFTS + 1):
            (row,) = plain.processed_rows([(), (), (4, 4, 4)], logits[j:])
            assert rows[j].tobytes() == row.tobytes(), f"{name} drafts {drafts} row {j}"
            if j < NUM_DRAFTS:
                plain.commit(int(drafts[j]))


def test_forbidden_tokens_of_every_row() -> None:
    """What the bit-for-bit test cannot see: that a rule does anything, and where it ends."""
    worker = Worker(requests_of({"min_tokens": 3, "stop_token_ids": (9,)}, BAD_WORDS))
    m = worker.prepare([(), (2, 7, 1, 2, 7), ()])
    cu = m.cu_mask[: m.num_logits + 1]
    masks = np.split(m.mask_token_ids[: cu[-1]], cu[1:-1])
    # History 3 1 5 and then the drafts; 6 always, 2 and 9 for the first three tokens, then what completes a bad word.
    assert [mask.tolist() for mask in masks[1:-1]] == [[2, 4, 6, 8, 9], [2, 6, 9], [1, 2, 6, 7, 9], [6], [6], [1, 6, 7]]
    assert masks[-1].tolist() == []
