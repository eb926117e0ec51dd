"""The drafts that requests keep for their next step, and how a plan collects them. Knows no budget and no blocks.

A step's result brings the drafts of all its rows in one `DraftTokens`. A request keeps a span of it, not a copy:

    result of step s    [a a a a | b b | c c c]          one DraftTokens, sources and log-probabilities with it
    request b           origin = that result, begin = 4, num_drafts = 2
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_sd.engine.request_state import RequestState
from fastdeploy_sd.types import I8, I32, DraftTokens, LogprobArrays


def collect_drafts(states: Sequence[RequestState], num_draft: Sequence[int]) -> DraftTokens:
    """Put the first `num_draft[r]` drafts of every request behind each other, with their sources and logprobs."""
    if not any(num_draft):
        return DraftTokens.none(len(states))
    lengths = np.array(num_draft, np.int32)
    cu_num_draft = np.zeros(len(states) + 1, np.int32)
    np.cumsum(lengths, out=cu_num_draft[1:])
    # A row that a step left out keeps what an earlier result brought, so there may be several of them.
    origins = {id(state.draft_origin): state.draft_origin for state in states}
    begins = np.array([state.draft_begin for state in states], np.int32)
    if len(origins) > 1:
        first = dict(zip(origins, _starts(list(origins.values())), strict=True))
        begins += np.array([first[id(state.draft_origin)] for state in states], np.int32)
    all_drafts = _concatenate(list(origins.values()))
    index = np.arange(cu_num_draft[-1], dtype=np.int32) + np.repeat(begins - cu_num_draft[:-1], lengths)
    return DraftTokens(
        all_drafts.token_ids[index],
        cu_num_draft,
        None if all_drafts.sources is None else all_drafts.sources[index],
        None if all_drafts.logprobs is None else _take(all_drafts.logprobs, index),
    )


def _starts(origins: Sequence[DraftTokens]) -> list[int]:
    """Where each one's drafts begin in their concatenation."""
    ends = np.cumsum([len(origin.token_ids) for origin in origins])
    return [0, *ends[:-1].tolist()]


def _concatenate(origins: Sequence[DraftTokens]) -> DraftTokens:
    """One DraftTokens with the drafts of all; its rows mean nothing."""
    if len(origins) == 1:
        return origins[0]
    sources: I8 | None = None
    if any(origin.sources is not None for origin in origins):
        sources = np.concatenate([_sources(origin) for origin in origins])
    return DraftTokens(
        np.concatenate([origin.token_ids for origin in origins]),
        np.zeros(1, np.int32),
        sources,
        _concatenate_logprobs(origins),
    )


def _sources(drafts: DraftTokens) -> I8:
    return np.zeros(len(drafts.token_ids), np.int8) if drafts.sources is None else drafts.sources


def _concatenate_logprobs(origins: Sequence[DraftTokens]) -> LogprobArrays | None:
    """Log-probabilities over the drafts of all, with as many alternatives as the widest; NaN where there are none."""
    if all(origin.logprobs is None for origin in origins):
        return None
    num_drafts = sum(len(origin.token_ids) for origin in origins)
    width = max(o.logprobs.top_token_ids.shape[1] for o in origins if o.logprobs is not None)
    merged = LogprobArrays(
        np.full(num_drafts, np.nan, np.float32),
        np.zeros(num_drafts, np.int32),
        np.zeros((num_drafts, width), np.int32),
        np.full((num_drafts, width), np.nan, np.float32),
    )
    for begin, origin in zip(_starts(origins), origins, strict=True):
        if origin.logprobs is not None:
            end, columns = begin + len(origin.token_ids), origin.logprobs.top_token_ids.shape[1]
            merged.logprobs[begin:end] = origin.logprobs.logprobs
            merged.ranks[begin:end] = origin.logprobs.ranks
            merged.top_token_ids[begin:end, :columns] = origin.logprobs.top_token_ids
            merged.top_logprobs[begin:end, :columns] = origin.logprobs.top_logprobs
    return merged


def _take(arrays: LogprobArrays, index: I32) -> LogprobArrays:
    return LogprobArrays(
        arrays.logprobs[index], arrays.ranks[index], arrays.top_token_ids[index], arrays.top_logprobs[index]
    )
