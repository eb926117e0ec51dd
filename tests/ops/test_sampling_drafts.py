"""Stopping at a request's first wrong draft changes nothing that is emitted, on any level and number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.device import library
from fastdeploy_sd.ops.candidates import DraftedRows
from fastdeploy_sd.ops.sampling import sample
from fastdeploy_sd.ops.verification import verify_draft_tokens
from fastdeploy_sd.types import DraftTokens, SamplingArrays
from tests.ops.backends import isa, threads
from tests.ops.cases.sampling import offsets
from tests.ops.cases.sampling_rows import logits_of
from tests.ops.sampling_arrays import build_sampling_arrays

VOCAB = 20001
NUM_DRAFT = 4


def step(num_requests: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, SamplingArrays]:
    """Every filter, penalties that count drafts, and now and then a row that is broken."""
    rng = np.random.default_rng(num_requests)
    rows = num_requests * (NUM_DRAFT + 1)
    logits = logits_of(rng, "steep", rows, VOCAB)
    is_broken = rng.random(rows) < 0.1
    is_broken[: NUM_DRAFT + 1] = False  # one request whose drafts can be right
    logits[is_broken, 3] = np.nan
    sampling = build_sampling_arrays(
        num_requests,
        rows,
        temperature=rng.choice([0.0, 0.7, 1.5], num_requests),
        top_k=rng.choice([0, 30, 5000], num_requests),
        top_p=rng.choice([1.0, 0.9], num_requests),
        min_p=rng.choice([0.0, 0.02], num_requests),
        seed=rng.integers(0, 2**63, num_requests),
        vocab=VOCAB,
    )
    request_ids = np.repeat(np.arange(num_requests, dtype=np.int32), NUM_DRAFT + 1)
    return logits, request_ids, rng.integers(0, 10**6, rows).astype(np.int32), sampling


# One request has all threads on each of its rows; of many requests, each has a thread.
@pytest.mark.parametrize("num_requests", [1, 2, 24])
@pytest.mark.parametrize("level", library.available_isas())
def test_the_output_is_that_of_drawing_every_row(level: str, num_requests: int) -> None:
    logits, request_ids, positions, sampling = step(num_requests)
    per_request = np.full(num_requests, NUM_DRAFT)
    cu_num_logits, cu_num_draft = offsets(per_request + 1), offsets(per_request)

    def drawn_after(guesses: np.ndarray) -> np.ndarray:
        """The token of every row, whatever the drafts are worth."""
        drafted = DraftedRows(cu_num_logits, DraftTokens(guesses.reshape(-1), cu_num_draft), is_verified=False)
        with isa(level), threads(1):
            return sample(logits, request_ids, positions, sampling, drafted)

    right = np.zeros((num_requests, NUM_DRAFT), np.int32)
    for j in range(NUM_DRAFT):  # what a row draws depends on the drafts before it
        right[:, j] = drawn_after(right).reshape(num_requests, NUM_DRAFT + 1)[:, j].clip(0)
    num_left_out = num_accepted = 0
    for num_right in range(NUM_DRAFT + 1):
        guesses = np.where(np.arange(NUM_DRAFT) < num_right, right, (right + 1) % VOCAB).astype(np.int32)
        draft, everything = DraftTokens(guesses.reshape(-1), cu_num_draft), drawn_after(guesses)
        want = verify_draft_tokens(everything, cu_num_logits, draft)
        num_accepted += int(want[2].sum())
        for count in (1, 2, 3):
            with isa(level), threads(count):
                drawn = sample(logits, request_ids, positions, sampling, DraftedRows(cu_num_logits, draft))
            for got, wanted in zip(verify_draft_tokens(drawn, cu_num_logits, draft), want, strict=True):
                np.testing.assert_array_equal(got, wanted)
            is_drawn = drawn != -2
            np.testing.assert_array_equal(drawn[is_drawn], everything[is_drawn])
        num_left_out += int((~is_drawn).sum())
    assert num_left_out > 0
    assert num_accepted > 0


@pytest.mark.parametrize(
    ("cu_num_logits", "cu_num_draft", "message"),
    [
        ([0, 1], [0, 1], "cu_num_logits: expected the rows of logits last"),
        ([0, 2], [0, 0], "cu_num_logits: expected at most drafts . 1 rows"),
        ([1, 2], [0, 1], "cu_num_logits: expected 0 and rising offsets"),
        ([0, 2], [1, 1], "cu_num_draft: expected 0 and rising offsets"),
        ([0, 2, 2], [0, 1, 1], "cu_num_logits: expected shape"),
    ],
)
def test_offsets_that_disagree_are_refused(cu_num_logits: list[int], cu_num_draft: list[int], message: str) -> None:
    logits, rows = np.zeros((2, 10), np.float32), np.zeros(2, np.int32)
    draft = DraftTokens(np.zeros(cu_num_draft[-1], np.int32), np.array(cu_num_draft, np.int32))
    drafted = DraftedRows(np.array(cu_num_logits, np.int32), draft)
    with pytest.raises(ValueError, match=message):
        sample(logits, rows, rows, build_sampling_arrays(1, 2, vocab=10), drafted)
