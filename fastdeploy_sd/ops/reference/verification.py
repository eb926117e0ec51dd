"""Meaning of verify_draft_tokens."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.ops.candidates import AcceptPolicy, Candidates
from fastdeploy_sd.types import EMPTY_I32, I32, DraftTokens, Rows, offsets


def verify_draft_tokens(
    sampled_token_ids: I32,
    cu_num_logits: I32,
    draft: DraftTokens,
    policy: AcceptPolicy = AcceptPolicy.NORMAL,
    candidates: Candidates | None = None,
) -> tuple[I32, I32, I32, I32]:
    """Keep a prefix of each request's drafts, then emit the sampled token of the row after it.

    Drafts that are trees are verified by equality, and keep a path: after row 0, the first child of the row whose draft
    is the row's sampled token, as long as there is one. Row j > 0 is that of draft j - 1.

    Without candidates the prefix ends before the first draft that differs from its row's sampled token. With candidates
    a draft is kept when it is a usable one of its row. One that is not is still kept when it is its row's second
    candidate and each of the verify_window drafts after it is the first candidate of its own row; these are kept with
    it, and verifying goes on at the row after them. With fewer drafts left than the window it is not kept. ACCEPT_ALL
    keeps all drafts and REJECT_ALL none, unseen.

    A request of which a row up to the emitted one has no sampled token (-1) has failed. Without candidates the output
    is what plain decoding gives before it fails: if the row after the kept drafts has no token, the last of them is not
    kept, but emitted as the sampled token that it equals, and the next step fails.

    Returns:
        token_ids i32[O], cu_num_output i32[R+1], num_accepted i32[R]: nothing of a failed request; output_rows i32[O],
        the row of which each is the token.

    Source: FastDeploy, op verify_draft_tokens (topp and its window); there, verifying skips the row after a window.
    """
    outputs, output_rows, accepted = [], [], []
    for r in range(len(cu_num_logits) - 1):
        rows, drafts = np.arange(cu_num_logits[r], cu_num_logits[r + 1]), draft.row(r)
        sampled, path = sampled_token_ids[rows], np.arange(len(rows))
        if policy == AcceptPolicy.REJECT_ALL:
            keep = 0
        elif policy == AcceptPolicy.ACCEPT_ALL:
            keep = len(drafts)
        elif candidates is None:
            path = _equal_path(draft, r, sampled)
            keep = len(path) - 1
            keep -= keep > 0 and sampled[path[keep]] < 0
        else:
            keep = _count_plausible(drafts, candidates.token_ids[rows], candidates.lens[rows], candidates.verify_window)
        path = path[: keep + 1]
        failed = len(rows) == 0 or bool((sampled[path] < 0).any())
        accepted.append(0 if failed else keep)
        outputs.append(EMPTY_I32 if failed else np.append(drafts[path[1:] - 1], sampled[path[keep]]))
        output_rows.append(EMPTY_I32 if failed else rows[path])
    cu_num_output = offsets([len(output) for output in outputs])
    token_ids, from_rows = (np.concatenate([EMPTY_I32, *parts]).astype(np.int32) for parts in (outputs, output_rows))
    return token_ids, cu_num_output, np.array(accepted, np.int32), from_rows


def _equal_path(draft: DraftTokens, r: int, sampled: I32) -> Rows:
    """The rows from row 0 to the last whose draft, like all before it, is the sampled token of its parent."""
    drafts, path = draft.row(r), [0][: len(sampled)]
    for j in range(1, len(drafts) + 1):
        parent = (draft.path(r, j - 1)[-2:-1] or [-1])[0] + 1
        if parent == path[-1] and drafts[j - 1] == sampled[parent]:
            path.append(j)
    return np.array(path, np.intp)


def _count_plausible(drafts: I32, candidates: I32, lens: I32, verify_window: int) -> int:
    """The length of the prefix to keep, by recursion on the drafts that are left."""
    if len(drafts) == 0:
        return 0
    step = 0
    if drafts[0] in candidates[0, : lens[0]]:
        step = 1
    elif drafts[0] in candidates[0, 1:2] and len(drafts) > verify_window:
        window = slice(1, 1 + verify_window)
        step = 1 + verify_window if (drafts[window] == candidates[window, 0]).all() else 0
    return step + _count_plausible(drafts[step:], candidates[step:], lens[step:], verify_window) if step else 0
