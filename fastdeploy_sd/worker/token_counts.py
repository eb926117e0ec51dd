"""TokenCounts: how often each token occurred in the requests that have a penalty; rows exist only for those."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.types import I32

IN_PROMPT = 1 << 30


class TokenCounts:
    """A growing table of rows, one per penalised request.

    Attributes:
        table: i32[num_slots, V]: bits 0..29 count the token in the output, bit 30 says it is in the prompt.
    """

    def __init__(self, vocab_size: int) -> None:
        self.table = np.zeros((0, vocab_size), np.int32)
        self._free: list[int] = []

    def allocate(self, token_ids: I32, num_prompt_tokens: int) -> int:
        """Return a row that counts these tokens: prompt first, then output already produced."""
        if not self._free:
            rows, columns = self.table.shape
            grown = np.zeros((max(4, 2 * rows), columns), np.int32)
            grown[:rows] = self.table
            self.table = grown
            self._free = list(range(rows, len(grown)))[::-1]
        row = self._free.pop()
        self.table[row] = 0
        self.table[row, token_ids[:num_prompt_tokens]] = IN_PROMPT
        output = token_ids[num_prompt_tokens:]
        self.add_output(np.full(len(output), row, np.int32), output)
        return row

    def add_output(self, rows: I32, token_ids: I32) -> None:
        """Count output tokens i32[n], each in its row of i32[n]; a repeated one counts each time."""
        np.add.at(self.table, (rows, token_ids), 1)

    def free(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)
