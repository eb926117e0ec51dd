"""RequestTable: the worker's memory of the running requests, as columns indexed by table row.

A request holds one table row from its NewRequest until it is finished or preempted. Token ids and block ids live in two
tables whose rows the batch ops gather from, so a step costs no Python per token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fastdeploy_sd.device.step_memory import StepMemory
from fastdeploy_sd.rules.requests import RequestRules
from fastdeploy_sd.rules.sampling import MAX_LOGIT_BIAS
from fastdeploy_sd.types import (
    EMPTY_I32,
    I32,
    NewRequest,
    RequestId,
    SamplingArrays,
    SchedulerOutput,
)
from fastdeploy_sd.worker.step.pooled_prompt import PooledPrompt
from fastdeploy_sd.worker.step.token_rules import TokenRules

IN_PROMPT = 1 << 30
NO_STATE_YET, LOST_STATE = -1, -2  # of RequestTable.state_lens


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


class Changes(NamedTuple):
    """The requests that a plan added and dropped.

    Attributes:
        dropped: i32[n], freed table rows; an added request may have got one of them.
        added: the accepted new requests, and their table rows.
        refused: the other new requests, and why: the table keeps nothing of them.
    """

    dropped: I32
    added: Sequence[tuple[NewRequest, int]]
    refused: Mapping[RequestId, Exception]


_NO_CHANGES = Changes(EMPTY_I32, (), {})


class RequestTable:
    """Columns over table rows.

    Attributes:
        tokens: i32[max_num_seqs, max_model_len]; num_tokens: i32[max_num_seqs] committed.
        max_total: i32[max_num_seqs], the most committed tokens: prompt + max_tokens, at most max_model_len.
        group_blocks: per KV group i32[max_num_seqs, max_blocks], -1 past the request's own. blocks: of the first one.
        num_blocks: i32[max_num_seqs], that a request has in every group.
        temperature .. bias_values: one value or row per table row; see SamplingArrays.
        has_mask: bool[max_num_seqs], whether some token may be forbidden to the request; num_masks: to how many.
        num_draft_logprobs: alternatives reported with every draft, -1 = none wanted.
        num_reports: how many requests want log-probabilities, of output or of drafts. It and num_masks save reading a
            column, 30 us with cold caches, in steps without such requests.
        state_lens: i32[max_num_seqs], tokens in a request's recurrent state: NO_STATE_YET until its first step,
            LOST_STATE after a step that failed. num_state_drafts: of its last step, rows kept besides.
        pooled: table row -> the embedding of its prompt so far, of requests that ask for it.
        adapter_slots: i32[max_num_seqs], the place of a request's LoRA adapter, -1 = it has none.
        is_guided: bool[max_num_seqs], whether a request has a grammar.
        rules: TokenRules by table row.
        new_rows, rows_with_blocks: table rows that requests got, and those that got blocks, since the code that copies
            the columns cleared these sets.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, num_groups: int = 1
    ) -> None:
        self.block_size, max_blocks = block_size, -(-max_model_len // block_size)
        self.tokens = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.max_total = np.zeros(max_num_seqs, np.int32)
        self.group_blocks = [np.full((max_num_seqs, max_blocks), -1, np.int32) for _ in range(num_groups)]
        self.blocks = self.group_blocks[0]
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self._num_group_blocks = np.zeros((num_groups, max_num_seqs), np.int32)
        self.temperature, self.top_p, self.min_p = (np.zeros(max_num_seqs, np.float32) for _ in range(3))
        self.repetition, self.presence, self.frequency = (np.zeros(max_num_seqs, np.float32) for _ in range(3))
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.count_rows = np.full(max_num_seqs, -1, np.int32)
        self.num_bias = np.zeros(max_num_seqs, np.int32)
        self.bias_token_ids = np.zeros((max_num_seqs, MAX_LOGIT_BIAS), np.int32)
        self.bias_values = np.zeros((max_num_seqs, MAX_LOGIT_BIAS), np.float32)
        self.has_mask, self.num_masks = np.zeros(max_num_seqs, np.bool_), 0
        self.rules: dict[int, TokenRules] = {}
        self._rules = RequestRules(vocab_size, max_model_len)
        self.counts = TokenCounts(max_num_seqs, vocab_size)
        self.num_logprobs, self.num_draft_logprobs = np.full((2, max_num_seqs), -1, np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.num_reports = self.num_prompt_reports = 0
        self.pooled: dict[int, PooledPrompt] = {}
        self.adapter_slots = np.full(max_num_seqs, -1, np.int32)
        self.state_lens, self.num_state_drafts = np.zeros((2, max_num_seqs), np.int32)
        self.is_guided = np.zeros(max_num_seqs, np.bool_)
        self.new_rows: set[int] = set()
        self.rows_with_blocks: set[int] = set()
        self._table_row_of: dict[RequestId, int] = {}
        self._free = list(range(max_num_seqs))[::-1]

    def apply(self, plan: SchedulerOutput) -> Changes:
        """Drop ended and preempted requests, add new ones, append new blocks."""
        if not (plan.new or plan.deltas or plan.finished_ids or plan.preempted_ids):
            return _NO_CHANGES
        dropped = self.drop((*plan.finished_ids, *plan.preempted_ids))
        added: list[tuple[NewRequest, int]] = []
        refused: dict[RequestId, Exception] = {}
        for new in plan.new:
            try:
                added.append((new, self._add(new)))
            except Exception as error:
                refused[new.request.request_id] = error
        for delta in plan.deltas:
            self._append_blocks(self._table_row_of[delta.request_id], delta.new_block_ids, delta.num_blocks)
        return Changes(dropped, added, refused)

    def table_rows(self, request_ids: Sequence[RequestId]) -> I32:
        """Return i32[R], the table row of each request."""
        return np.fromiter([self._table_row_of[i] for i in request_ids], np.int32, len(request_ids))

    def num_tokens_of(self, request_id: RequestId) -> int:
        """Return the number of a request's committed tokens; 1 for an unknown request."""
        row = self._table_row_of.get(request_id)
        return 1 if row is None else self.num_tokens.item(row)

    def sampling(self, memory: StepMemory) -> SamplingArrays:
        """Return the whole columns, with the rows and masks of `memory`, to bind calls to."""
        return SamplingArrays(
            table_rows=memory.table_rows,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition,
            presence_penalty=self.presence,
            frequency_penalty=self.frequency,
            seed=self.seed,
            num_logprobs=self.num_logprobs,
            count_rows=self.count_rows,
            token_counts=self.counts.table,
            num_bias=self.num_bias,
            bias_token_ids=self.bias_token_ids,
            bias_values=self.bias_values,
            cu_mask=memory.cu_mask,
            mask_token_ids=memory.mask_token_ids,
            allowed_rows=memory.allowed_rows,
            allowed_bits=memory.allowed_bits,
        )

    def send_all(self) -> None:
        """Mark the columns of every request to be copied again."""
        table_rows = self._table_row_of.values()
        self.new_rows.update(table_rows)
        self.rows_with_blocks.update(table_rows)

    def drop(self, request_ids: Iterable[RequestId]) -> I32:
        """Forget requests and return their table rows; unknown ids are ignored: some end before they ran."""
        dropped = []
        for request_id in request_ids:
            table_row = self._table_row_of.pop(request_id, None)
            if table_row is None:
                continue
            for blocks, count in zip(self.group_blocks, self._num_group_blocks[:, table_row], strict=True):
                blocks[table_row, :count] = -1
            if self.count_rows[table_row] >= 0:
                self.counts.free(int(self.count_rows[table_row]))
            del self.rules[table_row]
            self.num_reports -= self._wants_report(table_row)
            self.num_prompt_reports -= bool(self.num_prompt_logprobs[table_row] >= 0)
            self.num_masks -= bool(self.has_mask[table_row])
            self.pooled.pop(table_row, None)
            self._free.append(table_row)
            dropped.append(table_row)
        return np.array(dropped, np.int32)

    def _add(self, new: NewRequest) -> int:
        """Add a request; if that raises, nothing has changed."""
        request, s = new.request, new.request.sampling
        assert request.request_id not in self._table_row_of, f"request {request.request_id} was added twice"
        self._rules.verify(request)
        rules = TokenRules.of(request, new.num_prompt_tokens)
        penalised = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        count_row = self.counts.allocate(new.token_ids, new.num_prompt_tokens) if penalised else -1
        table_row = self._table_row_of[request.request_id] = self._free.pop()
        n = len(new.token_ids)
        self.tokens[table_row, :n] = new.token_ids
        self.num_tokens[table_row] = n
        self.max_total[table_row] = new.num_prompt_tokens + request.max_tokens
        self._num_group_blocks[:, table_row] = 0
        self._append_blocks(table_row, new.block_ids, new.num_blocks)
        self.temperature[table_row], self.top_p[table_row], self.min_p[table_row] = s.temperature, s.top_p, s.min_p
        self.repetition[table_row], self.presence[table_row] = s.repetition_penalty, s.presence_penalty
        self.frequency[table_row], self.top_k[table_row] = s.frequency_penalty, s.top_k
        self.num_logprobs[table_row] = -1 if s.logprobs is None else s.logprobs
        # The prompt's are told with the first output token.
        wanted = s.prompt_logprobs if n == new.num_prompt_tokens else None
        self.num_prompt_logprobs[table_row] = -1 if wanted is None else wanted
        self.num_prompt_reports += wanted is not None
        if request.pooling is not None and n == new.num_prompt_tokens:
            self.pooled[table_row] = PooledPrompt(request.pooling)
        self.seed[table_row] = request.seed
        self.state_lens[table_row], self.num_state_drafts[table_row] = NO_STATE_YET, 0
        self.is_guided[table_row] = bool(request.grammar)
        self.adapter_slots[table_row] = new.adapter_slot
        self.rules[table_row], self.count_rows[table_row] = rules, count_row
        self.has_mask[table_row] = rules.has_mask
        self.num_masks += rules.has_mask
        num_bias = self.num_bias[table_row] = len(s.logit_bias)
        self.bias_token_ids[table_row, :num_bias] = list(s.logit_bias.keys())
        self.bias_values[table_row, :num_bias] = list(s.logit_bias.values())
        wanted = request.speculation.num_draft_logprobs
        self.num_draft_logprobs[table_row] = -1 if wanted is None else wanted
        self.num_reports += self._wants_report(table_row)
        self.new_rows.add(table_row)
        return table_row

    def _wants_report(self, table_row: int) -> bool:
        return bool(self.num_logprobs[table_row] >= 0 or self.num_draft_logprobs[table_row] >= 0)

    def _append_blocks(self, table_row: int, block_ids: tuple[int, ...], num_blocks: tuple[int, ...]) -> None:
        first = 0
        for g, count in enumerate(num_blocks or (len(block_ids),)):
            begin = self._num_group_blocks.item(g, table_row)
            self.group_blocks[g][table_row, begin : begin + count] = block_ids[first : first + count]
            self._num_group_blocks[g, table_row] = begin + count
            first += count
        self.num_blocks[table_row] = self._num_group_blocks[:, table_row].min()
        self.rows_with_blocks.add(table_row)
