"""verify_draft_tokens on Paddle tensors. What it returns as NumPy is a result of the step."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy_sd.ops import shim
from fastdeploy_sd.ops.candidates import AcceptPolicy, Candidates
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.types import I32, DraftTokens


def verify_draft_tokens(
    sampled_token_ids: Tensor,
    cu_num_logits: I32,
    draft: DraftTokens,
    policy: AcceptPolicy = AcceptPolicy.NORMAL,
    candidates: Candidates | None = None,
) -> tuple[I32, I32, I32]:
    """Keep a prefix of each request's drafts and emit one token more; see `reference.verification.verify_draft_tokens`.

    Args:
        sampled_token_ids: i32[L], -1 for a failed row.
        cu_num_logits: i32[R+1]: drafts + 1 rows per request, or 0 while its prompt is unfinished.
        candidates: judge by them; None = by equality with the sampled tokens.

    Returns:
        token_ids i32[O], cu_num_output i32[R+1], num_accepted i32[R].

    Raises:
        ValueError: a shape or dtype disagrees, a request has neither drafts + 1 logits rows nor none of both, a draft
            is negative, there is no candidate per row, or a length or the window of the candidates is out of its range.
    """
    columns = [from_numpy(column) for column in (cu_num_logits, draft.token_ids, draft.cu_num_draft)]
    token_lists = (
        [None, None] if candidates is None else [from_numpy(candidates.token_ids), from_numpy(candidates.lens)]
    )
    window = 0 if candidates is None else candidates.verify_window
    token_ids, cu_num_output, num_accepted = (
        out.numpy()
        for out in shim.run("verify_draft_tokens", sampled_token_ids, *columns, *token_lists, int(policy), window)
    )
    return token_ids[: cu_num_output[-1]], cu_num_output, num_accepted
