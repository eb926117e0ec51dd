"""process_logits, sample, top_p_candidates and token_logprobs on NumPy arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from fastdeploy_sd.ops.candidates import DraftedRows
from fastdeploy_sd.ops.library import call, library
from fastdeploy_sd.ops.native.arrays import address, pointer
from fastdeploy_sd.ops.native.sampling_params import (
    ProcessLogitsParams,
    SampleParams,
    TokenLogprobsParams,
    TopPCandidatesParams,
)
from fastdeploy_sd.ops.native.standing_call import Room, StandingCall
from fastdeploy_sd.types import F32, I32, DraftTokens, SamplingArrays

# Field of SampleParams -> the column of SamplingArrays with a value per request, and its type.
_FILTERS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.uint64,
}
_PENALTIES = {
    "repetition": ("repetition_penalty", np.float32),
    "presence": ("presence_penalty", np.float32),
    "frequency": ("frequency_penalty", np.float32),
    "slot": ("penalty_slot", np.int32),
}


class Sampler:
    """Draws the tokens of step after step, into memory that the steps share.

    Args:
        max_candidate_len: how many plausible tokens to list besides, by which the token is drawn too; None = none. See
            `reference.sampling.sample` and `reference.sampling.top_p_candidates`.
    """

    def __init__(self, max_candidate_len: int | None = None) -> None:
        self._max_candidate_len = max_candidate_len
        self._token_ids = Room(np.int32)
        self._candidates, self._lens = Room(np.int32, (max(max_candidate_len or 0, 0),)), Room(np.int32)
        self._last: tuple[SamplingArrays, tuple[int, int]] | None = None
        if max_candidate_len is None:
            self._rows = SampleParams()
            self._call = self._lists = StandingCall("sample", self._rows)
        else:
            params = TopPCandidatesParams(max_candidate_len=max_candidate_len)
            self._rows = params.rows
            self._lists = StandingCall("top_p_candidates", params)
            self._call = StandingCall("top_p_candidates", params, params.rows)

    def draw(
        self,
        logits: F32,
        batch_id_per_output: I32,
        positions: I32,
        sampling: SamplingArrays,
        drafted: DraftedRows | None = None,
    ) -> I32:
        """See `reference.sampling.sample`.

        Returns:
            i32[L], which holds until the next draw.

        Raises:
            ValueError: a shape, dtype or offset disagrees, or a parameter is out of its range.
        """
        num_rows, vocab_size = shape = logits.shape
        bind, rows = self._call.bind, self._rows
        last, self._last = self._last, None  # until all are bound
        bind("logits", logits, shape, np.float32)
        bind("batch_id_per_output", batch_id_per_output, (num_rows,), np.int32)
        bind("positions", positions, (num_rows,), np.int32)
        if last is None or last[0] is not sampling or last[1] != shape:
            rows.num_rows, rows.num_requests, rows.vocab_size = num_rows, len(sampling.seed), vocab_size
            self._make_room(num_rows)
            for name, dtype in _FILTERS.items():
                bind(name, getattr(sampling, name), (len(sampling.seed),), dtype)
            rows.num_slots = _bind_rules(self._call, sampling, num_rows, vocab_size)
            last = sampling, shape
        rows.stops_at_wrong_draft = drafted is not None and drafted.is_judged
        _bind_drafted(self._call, drafted, len(sampling.seed))
        self._last = last
        self._call.run()
        return self._token_ids.first(num_rows)

    def draw_again(self) -> I32:
        """Draw from the arrays of the last draw, in which something else may be now.

        Raises:
            ValueError: nothing was drawn before, or the last draw was refused.
        """
        if self._last is None:
            raise ValueError("draw_again: expected a draw before, got none")
        self._call.run()
        return self._token_ids.first(self._rows.num_rows)

    def candidates(self, num_rows: int) -> tuple[I32, I32]:
        """The plausible tokens of the rows drawn last, i32[L, C], and how many of each row's are usable, i32[L]."""
        return self._candidates.first(num_rows), self._lens.first(num_rows)

    def _make_room(self, num_rows: int) -> None:
        self._token_ids.reserve(num_rows)
        self._call.bind("token_ids", self._token_ids.whole, self._token_ids.whole.shape, np.int32)
        if self._max_candidate_len is not None:
            for name, room in (("candidate_token_ids", self._candidates), ("candidate_lens", self._lens)):
                room.reserve(num_rows)
                self._lists.bind(name, room.whole, room.whole.shape, np.int32)


def _bind_drafted(call: StandingCall, drafted: DraftedRows | None, num_requests: int) -> None:
    if drafted is None:
        for name in ("cu_num_logits", "draft_token_ids", "cu_num_draft"):
            call.bind(name, None, (), np.int32)
        return
    draft, offsets = drafted.draft, (num_requests + 1,)
    call.bind("cu_num_logits", drafted.cu_num_logits, offsets, np.int32)
    call.bind("cu_num_draft", draft.cu_num_draft, offsets, np.int32)
    call.bind("draft_token_ids", draft.token_ids, (int(draft.cu_num_draft[-1]),), np.int32)


def _bind_rules(call: StandingCall, sampling: SamplingArrays, num_rows: int, vocab_size: int) -> int:
    """Bind the fields of LogitsRules; returns num_slots, its last one."""
    num_requests, num_slots = len(sampling.seed), len(sampling.token_counts)
    num_bias, num_mask = int(sampling.cu_bias[-1]), int(sampling.cu_mask[-1])
    for name, (column, dtype) in _PENALTIES.items():
        call.bind(name, getattr(sampling, column), (num_requests,), dtype)
    counts = sampling.token_counts if num_slots else None
    call.bind("token_counts", counts, (num_slots, vocab_size), np.int32)
    call.bind("cu_bias", sampling.cu_bias, (num_requests + 1,), np.int32)
    call.bind("bias_token_ids", sampling.bias_token_ids, (num_bias,), np.int32)
    call.bind("bias_values", sampling.bias_values, (num_bias,), np.float32)
    call.bind("cu_mask", sampling.cu_mask, (num_rows + 1,), np.int32)
    call.bind("mask_token_ids", sampling.mask_token_ids, (num_mask,), np.int32)
    return num_slots


def sample(
    logits: F32,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    drafted: DraftedRows | None = None,
) -> I32:
    """See `reference.sampling.sample`; what a Sampler does, once.

    Raises:
        ValueError: a shape, dtype or offset disagrees, or a parameter is out of its range.
    """
    return Sampler().draw(logits, batch_id_per_output, positions, sampling, drafted)


def top_p_candidates(
    logits: F32,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    max_candidate_len: int,
    drafted: DraftedRows | None = None,
) -> tuple[I32, I32, I32]:
    """See `reference.sampling.top_p_candidates`; what a Sampler does, once.

    Raises:
        ValueError: a shape or dtype disagrees, a parameter is out of its range, or max_candidate_len is below 1.
    """
    sampler = Sampler(max_candidate_len)
    token_ids = sampler.draw(logits, batch_id_per_output, positions, sampling, drafted)
    return token_ids, *sampler.candidates(len(logits))


def process_logits(logits: F32, rows: I32, cu_num_logits: I32, draft: DraftTokens, sampling: SamplingArrays) -> F32:
    """See `reference.sampling.process_logits`; sampling does the same to the rows it looks at.

    Raises:
        ValueError: a shape, dtype or offset disagrees, a row is none, or a token id is outside the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    num_requests = len(sampling.seed)
    y = np.empty((len(rows), vocab_size), np.float32)
    params = ProcessLogitsParams(num_rows, len(rows), num_requests, vocab_size, y=address(y))
    call = StandingCall("process_logits", params)
    call.bind("logits", logits, (num_rows, vocab_size), np.float32)
    call.bind("rows", rows, (len(rows),), np.int32)
    _bind_drafted(call, DraftedRows(cu_num_logits, draft), num_requests)
    params.num_slots = _bind_rules(call, sampling, num_rows, vocab_size)
    call.run()
    return y


def token_logprobs(logits: F32, token_ids: I32, num_top: int) -> tuple[F32, I32, I32, F32]:
    """See `reference.sampling.token_logprobs`.

    Raises:
        ValueError: a shape or dtype disagrees, a token id is outside the vocabulary, or num_top exceeds it.
    """
    num_rows, vocab_size = logits.shape
    shape = (num_rows, max(num_top, 0))
    logprobs, ranks = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
    top_token_ids, top_logprobs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    params = TokenLogprobsParams(
        num_rows,
        vocab_size,
        num_top,
        pointer("logits", logits, (num_rows, vocab_size), np.float32),
        pointer("token_ids", token_ids, (num_rows,), np.int32),
        *(address(array) for array in (logprobs, ranks, top_token_ids, top_logprobs)),
    )
    call("token_logprobs", params)
    return logprobs, ranks, top_token_ids, top_logprobs


def philox_uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position` of a request with `seed`."""
    function = library().fdsd_philox_uniform
    function.restype = ctypes.c_double
    return float(function(ctypes.c_uint64(seed), ctypes.c_uint32(position)))
