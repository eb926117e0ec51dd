"""TokenCounts: how often each token occurred in the requests that have a penalty."""

from __future__ import annotations

import heapq

import numpy as np

from fastdeploy_sd.types import I32

IN_PROMPT = 1 << 30


class TokenCounts:
    """A table with a row for every possible request; the lowest free row is used, so that few are ever touched.

    Attributes:
        table: i32[max_num_seqs, V]: bits 0..29 count the token in the output, bit 30 says it is in the prompt.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.table = np.zeros((max_num_seqs, vocab_size), np.int32)
        self._free = list(range(max_num_seqs))

    def allocate(self, token_ids: I32, num_prompt_tokens: int) -> int:
        """Return a row that counts these tokens: prompt first, then output already produced."""
        row = heapq.heappop(self._free)
        self.table[row] = 0
        self.table[row, token_ids[:num_prompt_tokens]] = IN_PROMPT
        np.add.at(self.table[row], token_ids[num_prompt_tokens:], 1)
        return row

    def free(self, row: int) -> None:
        """Free a row."""
        heapq.heappush(self._free, row)
