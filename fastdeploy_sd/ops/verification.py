"""verify_draft_tokens: its declaration, and the call on NumPy arrays."""

from __future__ import annotations

from typing import cast

from fastdeploy_sd.device.program import declaration as d
from fastdeploy_sd.device.program.declaration import Attr, In, Out, each
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.ops.candidates import AcceptPolicy, Candidates
from fastdeploy_sd.types import I32, DraftTokens

VERIFY_DRAFT_TOKENS = HostOp(
    "verify_draft_tokens",
    cu_num_logits=In(d.I32, "num_requests + 1"),
    draft_token_ids=In(d.I32, "num_drafts"),
    cu_num_draft=In(d.I32, "num_requests + 1"),
    sampled_token_ids=In(d.I32, "num_rows"),
    **each(Attr(int), "accept_policy", "max_candidate_len", "verify_window"),
    candidate_token_ids=In(d.I32, "num_rows, max_candidate_len", optional=True),
    candidate_lens=In(d.I32, "num_rows", optional=True),
    parent_rows=In(d.I32, "num_rows", optional=True),
    **each(Out(d.I32, "num_rows"), "token_ids", "output_rows"),
    cu_num_output=Out(d.I32, "num_requests + 1"),
    num_accepted=Out(d.I32, "num_requests"),
    num_failed=Out(d.I32, "1"),
)


def verify_draft_tokens(
    sampled_token_ids: I32,
    cu_num_logits: I32,
    draft: DraftTokens,
    policy: AcceptPolicy = AcceptPolicy.NORMAL,
    candidates: Candidates | None = None,
) -> tuple[I32, I32, I32, I32]:
    """See `reference.verification.verify_draft_tokens`."""
    found = Candidates(None, None, 0) if candidates is None else candidates  # type: ignore[arg-type]
    token_ids, output_rows, cu_num_output, num_accepted, _ = VERIFY_DRAFT_TOKENS(
        cu_num_logits=cu_num_logits,
        draft_token_ids=draft.token_ids,
        cu_num_draft=draft.cu_num_draft,
        sampled_token_ids=sampled_token_ids,
        accept_policy=int(policy),
        max_candidate_len=0 if candidates is None else candidates.token_ids.shape[1],
        verify_window=found.verify_window,
        candidate_token_ids=found.token_ids,
        candidate_lens=found.lens,
        parent_rows=draft.parent_rows(cu_num_logits),
    )
    end = cu_num_output[-1]
    outputs = token_ids[:end], cu_num_output, num_accepted, output_rows[:end]
    return cast("tuple[I32, I32, I32, I32]", outputs)
