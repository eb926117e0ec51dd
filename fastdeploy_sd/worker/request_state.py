"""RequestTable: the worker's memory of the running requests, as columns indexed by slot.

A request holds one slot from its NewRequest until it is finished or preempted. Token ids and block ids live in two
tables whose rows the batch ops gather from, so a step costs no Python per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fastdeploy_sd.ops.native.batch import OutputRows, TokenAppender, TokenTables
from fastdeploy_sd.request_rules import RequestRules
from fastdeploy_sd.types import (
    EMPTY_I32,
    I32,
    NewRequest,
    RequestId,
    SamplingArrays,
    SchedulerOutput,
    VerifyResult,
)
from fastdeploy_sd.worker.membership import Membership
from fastdeploy_sd.worker.slot_rules import SlotRules, gather_biases
from fastdeploy_sd.worker.token_counts import TokenCounts


class Changes(NamedTuple):
    """Who came and went with a plan.

    Attributes:
        dropped: i32[n], slots that were given up; one of the added may have got one.
        added: the new requests that were taken in, and their slots.
        refused: the others, and why: nothing is kept of them.
    """

    dropped: I32
    added: Sequence[tuple[NewRequest, int]]
    refused: Mapping[RequestId, Exception]


_NO_CHANGES = Changes(EMPTY_I32, (), {})


class RequestTable:
    """Columns over slots.

    Attributes:
        tokens: i32[max_num_seqs, max_model_len]; num_tokens: i32[max_num_seqs] committed.
        max_total: i32[max_num_seqs], prompt + max_tokens, at most max_model_len: no more tokens are ever committed.
        blocks: i32[max_num_seqs, max_blocks], -1 past the request's own.
        temperature .. num_logprobs, penalty_slot: one value per slot; see SamplingArrays.
        num_draft_logprobs: alternatives reported with every draft, -1 = none wanted.
        rules: SlotRules by slot.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.max_total = np.zeros(max_num_seqs, np.int32)
        self.blocks = np.full((max_num_seqs, max_blocks), -1, np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.temperature, self.top_p, self.min_p = (np.zeros(max_num_seqs, np.float32) for _ in range(3))
        self.repetition, self.presence, self.frequency = (np.zeros(max_num_seqs, np.float32) for _ in range(3))
        self.top_k, self.num_logprobs = (np.zeros(max_num_seqs, np.int32) for _ in range(2))
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.penalty_slot = np.full(max_num_seqs, -1, np.int32)
        self.rules: dict[int, SlotRules] = {}
        self._rules = RequestRules(vocab_size, max_model_len)
        self.counts = TokenCounts(vocab_size)
        self.num_draft_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._slot_of: dict[RequestId, int] = {}
        self._members: Membership | None = None
        self._appender = TokenAppender()
        self._tables = TokenTables(self.tokens, self.num_tokens, self.counts.table)
        self._output: OutputRows | None = None
        self._free = list(range(max_num_seqs))[::-1]

    def apply(self, plan: SchedulerOutput) -> Changes:
        """Drop what ended or was preempted, add what is new, append new blocks."""
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
            self._append_blocks(self._slot_of[delta.request_id], delta.new_block_ids)
        if plan.deltas and self._members is not None:
            self._members.block_tables = None
        return Changes(dropped, added, refused)

    def slots(self, request_ids: Sequence[RequestId]) -> I32:
        """Return i32[R], the slot of each request."""
        return np.fromiter([self._slot_of[i] for i in request_ids], np.int32, len(request_ids))

    def members(self, request_ids: tuple[RequestId, ...]) -> Membership:
        """Return what stays the same as long as steps run exactly these requests; gathered once for such steps."""
        members = self._members
        if members is None or (members.request_ids is not request_ids and members.request_ids != request_ids):
            members = self._members = self._gather(request_ids)
        return members

    def block_tables(self, members: Membership) -> I32:
        """Return i32[R, n], n the blocks of the member that has most; gathered again only after a table grew."""
        if members.block_tables is None:
            num_columns = int(self.num_blocks.take(members.slots).max())
            members.block_tables = self.blocks[:, :num_columns].take(members.slots, axis=0)
        return members.block_tables

    def commit(self, members: Membership, verified: VerifyResult) -> None:
        """Append every row's output tokens."""
        tables, output = self._tables, self._output
        if tables.counts is not self.counts.table:
            tables = self._tables = TokenTables(self.tokens, self.num_tokens, self.counts.table)
        if (
            output is None
            or output.slots is not members.slots
            or output.token_ids is not verified.token_ids
            or output.cu_num_output is not verified.cu_num_output
        ):
            columns = (verified.token_ids, verified.cu_num_output, members.penalty_slots)
            output = self._output = OutputRows(members.slots, *columns)
        self._appender.append(output, tables)

    def drop(self, request_ids: Iterable[RequestId]) -> I32:
        """Forget requests and return their slots; unknown ids are ignored (a request may end before it ever ran)."""
        dropped = []
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, None)
            if slot is None:
                continue
            self.blocks[slot, : self.num_blocks[slot]] = -1
            if self.penalty_slot[slot] >= 0:
                self.counts.free(int(self.penalty_slot[slot]))
            del self.rules[slot]
            self._free.append(slot)
            dropped.append(slot)
            self._members = None  # its id may soon stand for another request
        return np.array(dropped, np.int32)

    def _add(self, new: NewRequest) -> int:
        """Take a request in; if that raises, nothing has changed."""
        request, s = new.request, new.request.sampling
        assert request.request_id not in self._slot_of, f"request {request.request_id} was added twice"
        self._rules.verify(request)
        rules = SlotRules.of(request, new.num_prompt_tokens)
        penalised = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        penalty_slot = self.counts.allocate(new.token_ids, new.num_prompt_tokens) if penalised else -1
        slot = self._slot_of[request.request_id] = self._free.pop()
        n = len(new.token_ids)
        self.tokens[slot, :n] = new.token_ids
        self.num_tokens[slot] = n
        self.max_total[slot] = new.num_prompt_tokens + request.max_tokens
        self.num_blocks[slot] = 0
        self._append_blocks(slot, new.block_ids)
        self.temperature[slot], self.top_p[slot], self.min_p[slot] = s.temperature, s.top_p, s.min_p
        self.repetition[slot], self.presence[slot] = s.repetition_penalty, s.presence_penalty
        self.frequency[slot], self.top_k[slot] = s.frequency_penalty, s.top_k
        self.num_logprobs[slot] = -1 if s.logprobs is None else s.logprobs
        self.seed[slot] = request.seed
        self.rules[slot], self.penalty_slot[slot] = rules, penalty_slot
        wanted = request.speculation.num_draft_logprobs
        self.num_draft_logprobs[slot] = -1 if wanted is None else wanted
        return slot

    def _append_blocks(self, slot: int, block_ids: tuple[int, ...]) -> None:
        begin = int(self.num_blocks[slot])
        self.blocks[slot, begin : begin + len(block_ids)] = block_ids
        self.num_blocks[slot] = begin + len(block_ids)

    def _gather(self, request_ids: tuple[RequestId, ...]) -> Membership:
        slots = self.slots(request_ids)
        rules = [self.rules[slot] for slot in slots.tolist()]
        cu_bias, bias_token_ids, bias_values = gather_biases(rules)
        num_draft_logprobs = self.num_draft_logprobs.take(slots)
        sampling = SamplingArrays(
            temperature=self.temperature.take(slots),
            top_k=self.top_k.take(slots),
            top_p=self.top_p.take(slots),
            min_p=self.min_p.take(slots),
            repetition_penalty=self.repetition.take(slots),
            presence_penalty=self.presence.take(slots),
            frequency_penalty=self.frequency.take(slots),
            seed=self.seed.take(slots),
            num_logprobs=self.num_logprobs.take(slots),
            penalty_slot=self.penalty_slot.take(slots),
            token_counts=self.counts.table,
            cu_bias=cu_bias,
            bias_token_ids=bias_token_ids,
            bias_values=bias_values,
            cu_mask=np.zeros(1, np.int32),
            mask_token_ids=EMPTY_I32,
        )
        return Membership(
            request_ids,
            slots,
            self.max_total.take(slots),
            num_draft_logprobs if (num_draft_logprobs >= 0).any() else None,
            sampling,
            rules,
        )
