"""Log-probabilities of one request out of the arrays of a step. Knows no scheduling."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastdeploy_sd.types import DraftLogprob, DraftTokens, LogprobArrays, TokenLogprob


def slice_logprobs(
    arrays: LogprobArrays, begin: int, token_ids: Sequence[int], num_alternatives: int
) -> tuple[TokenLogprob, ...]:
    """Pick a row's log-probabilities out of a step's, with as many alternatives as the request asked for."""
    end = begin + len(token_ids)
    return tuple(
        TokenLogprob(token_id, logprob, rank, tuple(top_ids), tuple(top_logprobs))
        for token_id, logprob, rank, top_ids, top_logprobs in zip(
            token_ids,
            arrays.logprobs[begin:end].tolist(),
            arrays.ranks[begin:end].tolist(),
            arrays.top_token_ids[begin:end, :num_alternatives].tolist(),
            arrays.top_logprobs[begin:end, :num_alternatives].tolist(),
            strict=True,
        )
    )


def slice_draft_logprobs(
    drafts: DraftTokens, row: int, num_accepted: int, num_alternatives: int
) -> tuple[DraftLogprob, ...]:
    """Pick the drafts of a row that have a log-probability; those of methods without a model have none."""
    if drafts.logprobs is None:
        return ()
    begin = int(drafts.cu_num_draft[row])
    entries = slice_logprobs(drafts.logprobs, begin, drafts.row(row).tolist(), num_alternatives)
    return tuple(
        DraftLogprob(entry, position, position < num_accepted)
        for position, entry in enumerate(entries)
        if not math.isnan(entry.logprob)
    )
