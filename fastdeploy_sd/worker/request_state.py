"""RequestTable: the worker's memory of the running requests, as columns indexed by slot.

A request holds one slot from its NewRequest until it is finished or preempted. Token ids and block ids live in two
tables whose rows the batch ops gather from, so a step costs no Python per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastdeploy_sd.types import F32, I32, NewRequest, Request, RequestDelta, RequestId, SchedulerOutput, VerifyResult
from fastdeploy_sd.worker.token_counts import TokenCounts


@dataclass(frozen=True, slots=True, eq=False)
class SlotRules:
    """What only some requests have and is applied per logits row.

    Attributes:
        num_prompt_tokens: output token i is at position num_prompt_tokens + i.
        bias_token_ids, bias_values: i32[B], f32[B].
        bad_tokens: bad words of one token, forbidden everywhere.
        bad_words: longer sequences that may not be completed, by their last token but one: what came last picks the few
            that a row may complete.
        num_bad_prefix: tokens before its last that the longest bad word has.
        min_tokens, end_token_ids: the ids forbidden while fewer than min_tokens tokens were produced.
    """

    num_prompt_tokens: int
    bias_token_ids: I32
    bias_values: F32
    bad_tokens: frozenset[int]
    bad_words: Mapping[int, Sequence[tuple[int, ...]]]
    num_bad_prefix: int
    min_tokens: int
    end_token_ids: tuple[int, ...]

    @property
    def has_bad_words(self) -> bool:
        """Whether some token may be forbidden at any row."""
        return bool(self.bad_tokens or self.bad_words)

    @property
    def has_mask(self) -> bool:
        """Whether some token may be forbidden at some row."""
        return self.has_bad_words or (self.min_tokens > 0 and bool(self.end_token_ids))

    @staticmethod
    def of(request: Request, num_prompt_tokens: int) -> SlotRules:
        """Collect a request's rules."""
        s = request.sampling
        ends = (() if s.ignore_eos else request.eos_token_ids) + s.stop_token_ids
        bad = request.bad_words_token_ids
        bad_words: dict[int, list[tuple[int, ...]]] = {}
        for words in bad:
            if len(words) > 1:
                bad_words.setdefault(words[-2], []).append(words)
        return SlotRules(
            num_prompt_tokens,
            np.fromiter(s.logit_bias.keys(), np.int32, len(s.logit_bias)),
            np.fromiter(s.logit_bias.values(), np.float32, len(s.logit_bias)),
            frozenset(words[0] for words in bad if len(words) == 1),
            bad_words,
            max((len(words) - 1 for words in bad), default=0),
            s.min_tokens,
            tuple(dict.fromkeys(ends)),
        )


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
        self.counts = TokenCounts(vocab_size)
        self.num_draft_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._slot_of: dict[RequestId, int] = {}
        self._free = list(range(max_num_seqs))[::-1]

    def apply(self, plan: SchedulerOutput) -> tuple[I32, I32]:
        """Drop what ended or was preempted, add what is new, append new blocks.

        Returns:
            i32[n] slots that were given up, and i32[len(plan.new)] slots of the new requests; one slot may be in both.
        """
        dropped = self.drop((*plan.finished_ids, *plan.preempted_ids))
        added = np.array([self._add(new) for new in plan.new], np.int32)
        for delta in plan.deltas:
            self._extend(delta)
        return dropped, added

    def slots(self, request_ids: Sequence[RequestId]) -> I32:
        """Return i32[R], the slot of each request."""
        return np.fromiter((self._slot_of[i] for i in request_ids), np.int32, len(request_ids))

    def commit(self, slots: I32, verified: VerifyResult) -> None:
        """Append every row's output tokens."""
        lengths = np.diff(verified.cu_num_output)
        rows = np.repeat(slots, lengths)
        first = verified.cu_num_output[:-1]
        within = np.arange(len(rows), dtype=np.int32) - np.repeat(first, lengths)
        columns = np.repeat(self.num_tokens[slots], lengths) + within
        self.tokens[rows, columns] = verified.token_ids
        self.num_tokens[slots] += lengths
        count_rows = np.repeat(self.penalty_slot[slots], lengths)
        is_counted = count_rows >= 0
        if is_counted.any():
            self.counts.add_output(count_rows[is_counted], verified.token_ids[is_counted])

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
        return np.array(dropped, np.int32)

    def _add(self, new: NewRequest) -> int:
        request, s = new.request, new.request.sampling
        assert request.request_id not in self._slot_of, f"request {request.request_id} was added twice"
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
        self.rules[slot] = SlotRules.of(request, new.num_prompt_tokens)
        penalised = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        self.penalty_slot[slot] = self.counts.allocate(new.token_ids, new.num_prompt_tokens) if penalised else -1
        wanted = request.speculation.num_draft_logprobs
        self.num_draft_logprobs[slot] = -1 if wanted is None else wanted
        return slot

    def _extend(self, delta: RequestDelta) -> None:
        self._append_blocks(self._slot_of[delta.request_id], delta.new_block_ids)

    def _append_blocks(self, slot: int, block_ids: tuple[int, ...]) -> None:
        begin = int(self.num_blocks[slot])
        self.blocks[slot, begin : begin + len(block_ids)] = block_ids
        self.num_blocks[slot] = begin + len(block_ids)
