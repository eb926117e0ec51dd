"""verify_draft_tokens on NumPy arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from fastdeploy_sd.ops.candidates import AcceptPolicy, Candidates
from fastdeploy_sd.ops.library import CParams
from fastdeploy_sd.ops.native.standing_call import Room, StandingCall
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
        ("num_failed", ctypes.c_void_p),
    )


class DraftJudge:
    """Judges the drafts of step after step, into memory that the steps share.

    Args:
        policy: whether drafts are judged at all.
        verify_window: used where candidates are given; see `Candidates`.
    """

    def __init__(self, policy: AcceptPolicy = AcceptPolicy.NORMAL, verify_window: int = 0) -> None:
        self._params = VerifyDraftTokensParams(accept_policy=policy, verify_window=verify_window)
        self._call = StandingCall("verify_draft_tokens", self._params)
        self._token_ids, self._cu_num_output, self._num_accepted = Room(np.int32), Room(np.int32), Room(np.int32)
        self._num_rows = self._num_requests = -1
        self._num_failed = np.zeros(1, np.int32)
        self._call.bind("num_failed", self._num_failed, (1,), np.int32)

    @property
    def num_failed(self) -> int:
        """Requests that failed in the last call: they have logits rows and no output."""
        return int(self._num_failed[0])

    def judge(
        self, sampled_token_ids: I32, cu_num_logits: I32, draft: DraftTokens, candidates: Candidates | None = None
    ) -> tuple[I32, I32, I32]:
        """See `reference.verification.verify_draft_tokens`.

        Returns:
            Arrays that hold until the next call.

        Raises:
            ValueError: a shape or dtype disagrees, a request has neither drafts + 1 logits rows nor none of both, a
                draft is negative, there is no candidate per row, or a length or the window of the candidates is out of
                its range.
        """
        num_requests, num_rows = len(cu_num_logits) - 1, len(sampled_token_ids)
        bind, offsets = self._call.bind, (num_requests + 1,)
        bind("sampled_token_ids", sampled_token_ids, (int(cu_num_logits[-1]),), np.int32)
        bind("cu_num_logits", cu_num_logits, offsets, np.int32)
        bind("draft_token_ids", draft.token_ids, (int(draft.cu_num_draft[-1]),), np.int32)
        bind("cu_num_draft", draft.cu_num_draft, offsets, np.int32)
        self._bind_candidates(candidates, num_rows)
        if num_rows != self._num_rows or num_requests != self._num_requests:
            self._make_room(num_rows, num_requests)
        return self.judge_again()

    def judge_again(self) -> tuple[I32, I32, I32]:
        """Judge the arrays of the last call, in which something else may be now."""
        self._call.run()
        cu_num_output = self._cu_num_output.first(self._num_requests + 1)
        token_ids = self._token_ids.first(int(cu_num_output[-1]))
        return token_ids, cu_num_output, self._num_accepted.first(self._num_requests)

    def _bind_candidates(self, candidates: Candidates | None, num_rows: int) -> None:
        token_ids, lens, length = None, None, 0
        if candidates is not None:
            token_ids, lens, length = candidates.token_ids, candidates.lens, candidates.token_ids.shape[1]
            if length == 0:
                raise ValueError("candidate_token_ids: expected at least one candidate per row, got [L, 0]")
        self._params.max_candidate_len = length
        self._call.bind("candidate_token_ids", token_ids, (num_rows, length), np.int32)
        self._call.bind("candidate_lens", lens, (num_rows,), np.int32)

    def _make_room(self, num_rows: int, num_requests: int) -> None:
        self._params.num_requests = num_requests
        for name, room, size in (
            ("token_ids", self._token_ids, num_rows),
            ("cu_num_output", self._cu_num_output, num_requests + 1),
            ("num_accepted", self._num_accepted, num_requests),
        ):
            room.reserve(size)
            self._call.bind(name, room.whole, room.whole.shape, np.int32)
        self._num_rows, self._num_requests = num_rows, num_requests


def verify_draft_tokens(
    sampled_token_ids: I32,
    cu_num_logits: I32,
    draft: DraftTokens,
    policy: AcceptPolicy = AcceptPolicy.NORMAL,
    candidates: Candidates | None = None,
) -> tuple[I32, I32, I32]:
    """See `reference.verification.verify_draft_tokens`; what a DraftJudge does, once.

    Raises:
        ValueError: as DraftJudge.judge.
    """
    window = 0 if candidates is None else candidates.verify_window
    return DraftJudge(policy, window).judge(sampled_token_ids, cu_num_logits, draft, candidates)
