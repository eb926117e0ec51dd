"""Which KV slots of a draft model hold their request's tokens.

The KV of a model that reads only token ids follows from these. So a filled block is recognised by a digest of all
tokens up to its end, whichever request filled it, and however it came into the prefix cache. Blocks that were never
filled, or were filled with other tokens since, are filled when their request is drafted for. The slots of drafts that
the passes have run stay filled, if these drafts became tokens.
"""

from __future__ import annotations

import hashlib

import numpy as np

from fastdeploy_sd.spec_decode.model_based.draft_memory import DraftMemory
from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.types import I32

_DIGEST_BYTES = 8
_NO_DRAFT = -1


class TokenKv:
    """Keeps `next_slot` i32[S], the first slot of every table row that is not filled; -1 = not drafted for.

    Args:
        block_table: i32[S, max_blocks], on the host.
        max_drafts: of a request and step.
        vocab_size: of the token ids that the model knows, where it does not know all. A request with another one is
            not drafted for any more.
    """

    def __init__(
        self,
        next_slot: I32,
        block_table: I32,
        num_blocks: int,
        block_size: int,
        max_drafts: int,
        vocab_size: int | None,
    ) -> None:
        self._next_slot, self._block_table, self._block_size = next_slot, block_table, block_size
        self._vocab_size = vocab_size
        self._of_block = [b""] * num_blocks
        # By table row: digests of its leading filled blocks; tokens looked at; drafts in the slots from next_slot on.
        self._of_row: list[list[bytes]] = [[] for _ in next_slot]
        self._num_seen = np.zeros_like(next_slot)
        self._is_new = np.zeros(len(next_slot), np.bool_)
        self._run_drafts = np.full((len(next_slot), max_drafts), _NO_DRAFT, np.int32)

    def begin(self, table_row: int) -> None:
        """Begin a request; its blocks are looked at with its first step."""
        self._next_slot[table_row] = self._num_seen[table_row] = 0
        self._is_new[table_row] = True
        self._of_row[table_row].clear()
        self._run_drafts[table_row] = _NO_DRAFT

    def find(self, x: ProposeInput, step: TargetStep) -> None:
        """Find the filled slots of a step's rows, before it is planned."""
        rows = x.table_rows
        for r in np.flatnonzero(self._is_new[rows] & (self._next_slot[rows] >= 0)).tolist():
            self._find_blocks(x, rows.item(r), min(x.num_tokens.item(r) - 1, step.num_kv_slots.item(r)))
        self._is_new[rows] = False
        if self._vocab_size is not None:
            self._give_up_unknown(x, self._vocab_size)
        self._keep_run_drafts(x)

    def _find_blocks(self, x: ProposeInput, row: int, num_slots: int) -> None:
        """Find a new request's leading blocks that hold its tokens."""
        size, digest, found = self._block_size, b"", self._of_row[row]
        for i in range(num_slots // size):
            digest = _digest(digest, x.token_table[row, i * size : (i + 1) * size])
            if self._of_block[self._block_table.item(row, i)] != digest:
                break
            found.append(digest)
        self._next_slot[row] = len(found) * size

    def _keep_run_drafts(self, x: ProposeInput) -> None:
        """Count the slots of drafts as filled that are tokens now."""
        rows = x.table_rows
        first, drafts = self._next_slot[rows], self._run_drafts[rows]
        slots = first[:, None] + np.arange(drafts.shape[1])
        # The newest token runs in any case: the first draft is made from its row.
        is_token = slots < x.num_tokens[:, None] - 1
        tokens = x.token_table[rows[:, None], slots.clip(0, x.token_table.shape[1] - 1)]
        num_kept = np.cumprod(is_token & (tokens == drafts), axis=1, dtype=np.int32).sum(axis=1)
        self._next_slot[rows] += np.where(first >= 0, num_kept, 0).astype(np.int32)
        self._run_drafts[rows] = _NO_DRAFT

    def _give_up_unknown(self, x: ProposeInput, vocab_size: int) -> None:
        for row, end in zip(x.table_rows.tolist(), x.num_tokens.tolist(), strict=True):
            if x.token_table[row, self._num_seen[row] : end].max(initial=0) >= vocab_size:
                self._next_slot[row] = -1
            self._num_seen[row] = end

    def note_begin(self, m: DraftMemory) -> None:
        """Note which blocks the planned passes are about to write."""
        for r in np.flatnonzero(m.ends[0, : m.count] > m.begin[: m.count]).tolist():
            # A request that drafts has filled the slots of all its tokens, and runs all drafts but the last.
            past = m.ends.item(0, r) + max(m.num_wanted.item(r) - 1, 0)
            for i in range(m.begin.item(r) // self._block_size, -(-past // self._block_size)):
                self._of_block[self._block_table.item(m.table_rows.item(r), i)] = b""

    def note_end(self, x: ProposeInput, m: DraftMemory) -> None:
        """Note what the passes have filled: blocks of tokens, and slots of all drafts but each request's last."""
        for r in np.flatnonzero(m.ends[0, : m.count] > m.begin[: m.count]).tolist():
            row, size = m.table_rows.item(r), self._block_size
            known = self._of_row[row]
            for i in range(len(known), m.ends.item(0, r) // size):
                known.append(_digest(known[-1] if known else b"", x.token_table[row, i * size : (i + 1) * size]))
                self._of_block[self._block_table.item(row, i)] = known[-1]
            first, last = m.cu_num_draft.item(r), m.cu_num_draft.item(r + 1) - 1
            if last > first:
                self._run_drafts[row, : last - first] = m.draft_token_ids[first:last]


def _digest(before: bytes, tokens: I32) -> bytes:
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
