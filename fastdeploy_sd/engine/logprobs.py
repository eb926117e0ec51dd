"""Log-probabilities of one request out of the arrays of a step. Knows no scheduling."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_sd.types import LogprobArrays, TokenLogprob


def slice_logprobs(
    arrays: LogprobArrays, begin: int, token_ids: Sequence[int], num_alternatives: int
) -> tuple[TokenLogprob, ...]:
    """Pick a row's log-probabilities, with as many alternatives as the request asked for.

    Args:
        arrays: of the whole step; hold at least `num_alternatives` columns.
        begin: index of the row's first output token.
        token_ids: the row's output tokens that were kept.
        num_alternatives: k of this request; other requests of the step may have asked for more.
    """
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
