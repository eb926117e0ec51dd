"""Made-up log-probabilities that depend on the token only, so that a test can tell what it must get."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastdeploy_sd.types import I32, LogprobArrays


def toy_logprob(token_id: int) -> float:
    """The log-probability of a token: -(1 + id mod 7)."""
    return -(1.0 + token_id % 7)


def toy_logprobs(
    token_ids: I32, num_alternatives: int, vocab_size: int, has_logprob: npt.NDArray[np.bool_] | None = None
) -> LogprobArrays:
    """Values of all tokens; alternative j of a token is (id + j) mod vocab_size, less likely by j.

    Args:
        has_logprob: bool[len(token_ids)], the others get NaN and rank 0; None = all have one.
    """
    offsets = np.arange(num_alternatives, dtype=np.int32)
    logprobs = -(1.0 + token_ids % 7).astype(np.float32)
    ranks = np.ones(len(token_ids), np.int32)
    if has_logprob is not None:
        logprobs[~has_logprob], ranks[~has_logprob] = np.nan, 0
    top_token_ids = ((token_ids[:, None] + offsets) % vocab_size).astype(np.int32)
    return LogprobArrays(logprobs, ranks, top_token_ids, (logprobs[:, None] - offsets).astype(np.float32))
