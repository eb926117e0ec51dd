"""Bad arguments of verify_draft_tokens: refused before anything is written, naming the argument."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.ops import verification as native
from fastdeploy_sd.ops.candidates import AcceptPolicy, Candidates
from fastdeploy_sd.ops.verification import VERIFY_DRAFT_TOKENS
from fastdeploy_sd.types import DraftTokens
from tests.values import i32

SAMPLED = i32(1, 2, 3)


@pytest.mark.parametrize(
    ("cu_num_logits", "draft", "message"),
    [
        (i32(0, 2, 3), DraftTokens(i32(), i32(0, 0, 0)), "cu_num_logits: expected drafts"),
        (i32(0, 0, 3), DraftTokens(i32(1), i32(0, 1, 1)), "cu_num_logits: expected drafts"),
        (i32(0, 4, 3), DraftTokens(i32(1), i32(0, 1, 1)), "cu_num_logits: expected 0 and rising"),
        (i32(0, 2, 3), DraftTokens(i32(1), i32(0, 9, 1)), "cu_num_draft: expected 0 and rising"),
        (i32(0, 2, 3), DraftTokens(i32(-1), i32(0, 1, 1)), "draft_token_ids: expected >= 0"),
        (i32(0, 2, 4), DraftTokens(i32(1), i32(0, 1, 1)), "expected"),
    ],
)
def test_rows_and_drafts(cu_num_logits: np.ndarray, draft: DraftTokens, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.verify_draft_tokens(SAMPLED, cu_num_logits, draft)


@pytest.mark.parametrize(
    ("parents", "policy", "message"),
    [
        (i32(-1, 1), AcceptPolicy.NORMAL, "parent_rows: expected a row of the request before each"),
        (i32(-2, 0), AcceptPolicy.NORMAL, "parent_rows: expected a row of the request before each"),
        (i32(-1, 0), AcceptPolicy.ACCEPT_ALL, "parent_rows: expected none unless drafts are verified by equality"),
    ],
)
def test_trees(parents: np.ndarray, policy: AcceptPolicy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.verify_draft_tokens(SAMPLED, i32(0, 3), DraftTokens(i32(1, 2), i32(0, 2), parents=parents), policy)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (Candidates(np.zeros((3, 2), np.int32), i32(0, 1, 3), 2), "candidate_lens: expected 0..max_candidate_len"),
        (Candidates(np.zeros((3, 2), np.int32), i32(0, -1, 2), 2), "candidate_lens: expected 0..max_candidate_len"),
        (Candidates(np.zeros((3, 2), np.int32), i32(0, 1), 2), "candidate_lens: expected"),
        (Candidates(np.zeros((2, 2), np.int32), i32(0, 1, 2), 2), "candidate_token_ids: expected"),
        (Candidates(np.zeros((3, 2), np.int32), i32(0, 1, 2), -1), "verify_window: expected >= 0"),
        (Candidates(np.zeros((3, 0), np.int32), i32(0, 0, 0), 2), "max_candidate_len: expected >= 1 with candidates"),
    ],
)
def test_candidates(candidates: Candidates, message: str) -> None:
    arguments = (i32(0, 2, 3), DraftTokens(i32(1), i32(0, 1, 1)), AcceptPolicy.NORMAL, candidates)
    with pytest.raises(ValueError, match=message):
        native.verify_draft_tokens(SAMPLED, *arguments)


@pytest.mark.parametrize(
    ("max_candidate_len", "message"),
    [(1, "candidate_token_ids: expected candidates"), (0, "max_candidate_len: expected")],
)
def test_candidates_of_another_number_than_said(max_candidate_len: int, message: str) -> None:
    """At the C interface: none where there should be some, and the other way round."""
    given = {} if max_candidate_len else {"candidate_token_ids": np.zeros((3, 0), np.int32), "candidate_lens": SAMPLED}
    with pytest.raises(ValueError, match=message):
        VERIFY_DRAFT_TOKENS(
            cu_num_logits=i32(0, 3),
            draft_token_ids=i32(1, 2),
            cu_num_draft=i32(0, 2),
            sampled_token_ids=SAMPLED,
            accept_policy=0,
            max_candidate_len=max_candidate_len,
            verify_window=0,
            **given,
        )


def test_policy() -> None:
    arguments = (i32(0, 2, 3), DraftTokens(i32(1), i32(0, 1, 1)), 3)
    with pytest.raises(ValueError, match="accept_policy: expected 0"):
        native.verify_draft_tokens(SAMPLED, *arguments)  # type: ignore[arg-type]
