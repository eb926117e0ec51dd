"""verify_draft_tokens on NumPy arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from fastdeploy_sd.ops.candidates import AcceptPolicy, Candidates
from fastdeploy_sd.ops.library import CParams, call
from fastdeploy_sd.ops.native.arrays import address, pointer
from fastdeploy_sd.types import I32, DraftTokens


class VerifyDraftTokensParams(CParams):
    """Twin of fdsd::VerifyDraftTokensParams."""

    _fields_ = (
        ("num_requests", ctypes.c_int32),
        ("accept_policy", ctypes.c_int32),
        ("max_candidate_len", ctypes.c_int32),
        ("verify_window", ctypes.c_int32),
        ("sampled_token_ids", ctypes.c_void_p),
        ("cu_num_logits", ctypes.c_void_p),
        ("draft_token_ids", ctypes.c_void_p),
        ("cu_num_draft", ctypes.c_void_p),
        ("candidate_token_ids", ctypes.c_void_p),
        ("candidate_lens", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("cu_num_output", ctypes.c_void_p),
        ("num_accepted", ctypes.c_void_p),
    )


def verify_draft_tokens(
    sampled_token_ids: I32,
    cu_num_logits: I32,
    draft: DraftTokens,
    policy: AcceptPolicy = AcceptPolicy.NORMAL,
    candidates: Candidates | None = None,
) -> tuple[I32, I32, I32]:
    """See `reference.verification.verify_draft_tokens`.

    Raises:
        ValueError: a shape or dtype disagrees, a request has neither drafts + 1 logits rows nor none of both, a draft
            is negative, there is no candidate per row, or a length or the window of the candidates is out of its range.
    """
    num_requests, num_rows = len(cu_num_logits) - 1, int(cu_num_logits[-1])
    max_candidate_len = 0 if candidates is None else candidates.token_ids.shape[1]
    if candidates is not None and max_candidate_len == 0:
        raise ValueError("candidate_token_ids: expected at least one candidate per row, got [L, 0]")
    candidate_ids, lens = (None, None) if candidates is None else (candidates.token_ids, candidates.lens)
    token_ids = np.empty(len(sampled_token_ids), np.int32)
    cu_num_output, num_accepted = np.empty(num_requests + 1, np.int32), np.empty(num_requests, np.int32)
    params = VerifyDraftTokensParams(
        num_requests,
        policy,
        max_candidate_len,
        0 if candidates is None else candidates.verify_window,
        pointer("sampled_token_ids", sampled_token_ids, (num_rows,), np.int32),
        pointer("cu_num_logits", cu_num_logits, (num_requests + 1,), np.int32),
        pointer("draft_token_ids", draft.token_ids, (int(draft.cu_num_draft[-1]),), np.int32),
        pointer("cu_num_draft", draft.cu_num_draft, (num_requests + 1,), np.int32),
        pointer("candidate_token_ids", candidate_ids, (num_rows, max_candidate_len), np.int32),
        pointer("candidate_lens", lens, (num_rows,), np.int32),
        *(address(array) for array in (token_ids, cu_num_output, num_accepted)),
    )
    call("verify_draft_tokens", params)
    return token_ids[: cu_num_output[-1]], cu_num_output, num_accepted
