"""What is read from the logits that a step's drafts were made from: log-probabilities, and a tree's other tokens.

A pass continues after its most likely token. Where trees are made, the next best tokens of the same logits are further
children of what that token follows, and have no children themselves:

    root --- d0 ----- d1 ----- d2
        `--- a0  `--- a1  `--- a2
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy_sd.device.device_buffers import RowsOnDevice
from fastdeploy_sd.ops.sampling import token_logprobs
from fastdeploy_sd.spec_decode.model_based.draft_memory import DraftMemory
from fastdeploy_sd.types import F32, I32, MAX_TREE_ROWS, DraftTokens, LogprobArrays, offsets


class DraftLogprobs:
    """Log-probabilities of the drafts of requests that want them, under the drafter; others have NaN and rank 0.

    Args:
        wanted: i32[R], alternatives with each draft; -1 = none of it is wanted.
        token_map: i32[V], the token of each column of the logits; None = its number.
    """

    def __init__(self, wanted: I32, num_drafts: int, token_map: I32 | None) -> None:
        self._wanted, self._token_map = wanted, token_map
        self.arrays = LogprobArrays.empty(num_drafts, int(wanted.max()))

    def add(self, step: int, logits: F32 | RowsOnDevice, batch: DraftMemory) -> None:
        """Note draft `step`; the first rows of logits f32[R, V] are those of the requests with one.

        Where all drafts are made in step 0, there is a row for each.
        """
        if batch.of_draft:
            asked = np.flatnonzero(np.repeat(self._wanted >= 0, np.diff(batch.cu_num_draft[: batch.count + 1])))
            at = asked.astype(np.int32)
        else:
            drafting = np.flatnonzero(batch.num_wanted[: batch.count] > step)
            asked = np.flatnonzero(self._wanted[drafting] >= 0)
            at = batch.cu_num_draft[drafting[asked]] + step
        if len(asked) == 0:
            return
        # A failed draft is cut off afterwards.
        token_ids = batch.draft_token_ids[at].clip(0)
        num_top = min(self.arrays.top_token_ids.shape[1], int(logits.shape[1]))
        if self._token_map is not None:  # it rises
            token_ids = np.searchsorted(self._token_map[:-1], token_ids).astype(np.int32)
        found = LogprobArrays(*token_logprobs(logits, asked, token_ids, num_top))
        if self._token_map is not None:
            found = replace(found, top_token_ids=self._token_map[found.top_token_ids])
        self.arrays.put(at, found)


@dataclass(frozen=True, slots=True)
class DraftBranches:
    """Makes trees of chains.

    Attributes:
        top_k: the most likely tokens of each position that are drafted; 1 = chains.
        min_prob: a less probable one is not.
    """

    top_k: int
    min_prob: float = 0.0

    def wanted(self, num_logprobs: I32 | None, num_rows: int) -> I32 | None:
        """Return i32[R], the alternatives that `DraftLogprobs` is to have; None = there is no need of it.

        `num_logprobs`: i32[R], what the requests asked for, as `ProposeInput.num_draft_logprobs`.
        """
        if self.top_k == 1:
            return None if num_logprobs is None or not (num_logprobs >= 0).any() else num_logprobs
        least = np.full(num_rows, self.top_k, np.int32)
        return least if num_logprobs is None else np.maximum(least, num_logprobs)

    def grow(self, chains: DraftTokens, max_drafts: I32, num_logprobs: I32 | None) -> tuple[DraftTokens, F32]:
        """Return each row's tree: the chain and the other tokens, of all these the most probable together with what
        they follow; equals by place in the chain, then the likelier token.

        The chain's drafts come first, so each row begins with the likeliest chain.

        Args:
            chains: with log-probabilities, of which `top_k` alternatives or as many as there are.
            max_drafts: i32[R], drafts of a row at most.
            num_logprobs: as for `wanted`.

        Returns:
            The drafts, and f32[D], the probability of each after what it follows.
        """
        found, counts = chains.logprobs, np.diff(chains.cu_num_draft)
        assert found is not None, "trees are made of logits"
        tokens = np.column_stack([chains.token_ids, found.top_token_ids[:, : self.top_k]])
        logprobs = np.column_stack([found.logprobs, found.top_logprobs[:, : self.top_k]]).astype(np.float64)
        least = math.log(self.min_prob) if self.min_prob > 0 else -math.inf
        is_draft = (logprobs > -np.inf) & (logprobs >= least) & (tokens >= 0) & (tokens != tokens[:, :1])
        is_draft[:, 0] = True
        width, first = tokens.shape[1], np.repeat(chains.cu_num_draft[:-1], counts)
        # Sums fall along the drafts of all rows, so a draft's is never above that of what it follows.
        so_far = np.append(0.0, np.cumsum(logprobs[:, 0]))[:-1]
        score = np.where(is_draft, (so_far - so_far[first])[:, None] + logprobs, -np.inf).ravel()
        rows = np.repeat(np.arange(len(counts)), counts * width)
        order = np.lexsort((-score, rows))
        nth = np.arange(len(order)) - np.repeat(width * first, width)
        fits = nth < np.minimum(max_drafts, MAX_TREE_ROWS - 1)[rows]
        kept = order[fits & is_draft.ravel()[order]]
        kept = kept[np.lexsort((kept, kept % width > 0, rows[kept]))]
        draft, column = kept // width, kept % width
        trees = DraftTokens(
            tokens.ravel()[kept],
            offsets(np.bincount(rows[kept], minlength=len(counts))),
            logprobs=_logprobs_of(found, draft, column, num_logprobs, rows[kept]),
            parents=(draft - first[draft] - 1).astype(np.int32),
        )
        return trees.without_chains(), np.exp(logprobs.ravel()[kept]).astype(np.float32)


def _logprobs_of(
    found: LogprobArrays, draft: I32, column: I32, num_logprobs: I32 | None, rows: I32
) -> LogprobArrays | None:
    """Return those of a tree's drafts: column c > 0 has the c-th best token of the logits of a chain's draft."""
    if num_logprobs is None or not (num_logprobs >= 0).any():
        return None
    nodes, other = found.take(draft), np.flatnonzero(column)
    nodes.logprobs[other] = nodes.top_logprobs[other, column[other] - 1]
    nodes.ranks[other] = column[other]
    asked, num_top = np.flatnonzero(num_logprobs[rows] >= 0), int(num_logprobs.max())
    nodes = replace(nodes, top_token_ids=nodes.top_token_ids[:, :num_top], top_logprobs=nodes.top_logprobs[:, :num_top])
    trees = LogprobArrays.empty(len(draft), num_top)
    trees.put(asked, nodes.take(asked))
    return trees
