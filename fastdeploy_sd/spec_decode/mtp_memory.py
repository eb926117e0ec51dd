"""The memory of a step of MTP drafting: what its passes read and the drafts they write, once, at its bound.

As in step_memory.py, nothing is allocated in a step and no address changes. Knows no pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fastdeploy_sd.types import F32, I32


class DraftMemory:
    """Arrays and counts of the step that is drafted for.

    Args:
        num_requests: R at most.
        num_layers: draft layers.
        num_steps: drafts per request at most.

    Attributes:
        table_rows, num_committed, cu_num_draft, draft_token_ids, num_wanted, draft_prob, min_survival: see
            ops.mtp.DraftBatch. A draft that was not made is -1.
        num_drafts: i32[R], drafts that each request may get.
        begin, ends, hidden_begin, cu_hidden, draft_start_loc: see spec_decode.mtp_passes.DraftStep.
        count: R of the step.
        num_tokens: rows of each layer's first pass.
        num_drafting: requests that may get more than i drafts, by i.
        num_steps: most drafts of a request.
    """

    def __init__(self, num_requests: int, num_layers: int, num_steps: int) -> None:
        self.table_rows, self.num_committed, self.num_drafts, self.num_wanted = np.zeros((4, num_requests), np.int32)
        self.min_survival = np.zeros(num_requests, np.float32)
        self.begin, self.hidden_begin = np.zeros((2, num_requests), np.int32)
        self.ends = tuple(np.zeros((num_layers, num_requests), np.int32))
        self.cu_num_draft, self.cu_hidden, self.draft_start_loc = np.zeros((3, num_requests + 1), np.int32)
        self.draft_token_ids = np.zeros(num_requests * num_steps, np.int32)
        self.draft_prob = np.zeros(num_requests * num_steps, np.float32)
        self.count = self.num_steps = 0
        self.num_tokens = (0,) * num_layers
        self.num_drafting = (0,) * (max(num_layers, num_steps) + 1)

    def per_request(self) -> Mapping[str, I32 | F32]:
        """The columns with a value per request, by name, whole."""
        ends = {f"end_{layer}": end for layer, end in enumerate(self.ends)}
        names = ("table_rows", "num_committed", "begin", "hidden_begin", "num_wanted", "min_survival")
        return {name: getattr(self, name) for name in names} | ends

    def per_draft(self) -> Mapping[str, I32 | F32]:
        """The columns with a value per draft, by name, whole; the passes write them."""
        return {"draft_token_ids": self.draft_token_ids, "draft_prob": self.draft_prob}

    def offsets(self) -> Mapping[str, I32]:
        """The columns that begin with 0 and have one value more."""
        return {name: getattr(self, name) for name in ("cu_num_draft", "cu_hidden", "draft_start_loc")}

    def set_drafts(self) -> None:
        """Write what follows from `num_drafts` of the first `count` requests, and from `begin` and `ends[0]`."""
        n, num_layers = self.count, len(self.ends)
        num_drafts = self.num_drafts[:n]
        np.cumsum(num_drafts, out=self.cu_num_draft[1 : n + 1])
        self.num_wanted[:n] = num_drafts
        self.draft_token_ids[: self.cu_num_draft[n]] = -1
        np.cumsum(num_drafts > num_layers - 1, out=self.draft_start_loc[1 : n + 1])
        self.num_drafting = tuple(int((num_drafts > i).sum()) for i in range(len(self.num_drafting)))
        num_filled = int(self.ends[0][:n].sum() - self.begin[:n].sum())
        for layer in range(1, num_layers):
            np.add(self.ends[0][:n], layer * (num_drafts > layer), out=self.ends[layer][:n])
        self.num_tokens = tuple(num_filled + layer * self.num_drafting[layer] for layer in range(num_layers))
