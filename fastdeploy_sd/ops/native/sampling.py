"""process_logits, sample, top_p_candidates and token_logprobs on NumPy arrays."""

from __future__ import annotations

import ctypes

import numpy as np

from fastdeploy_sd.ops.candidates import DraftedRows
from fastdeploy_sd.ops.library import CParams, call, library
from fastdeploy_sd.ops.native.arrays import address, pointer
from fastdeploy_sd.ops.processed_logits import ProcessedLogits
from fastdeploy_sd.types import F32, I32, DraftTokens, SamplingArrays


def _columns(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


class ProcessLogitsParams(CParams):
    """Twin of fdsd::ProcessLogitsParams; the fields of its Penalties, Bias and Mask in their order."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_processed", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        *_columns("logits", "rows", "cu_num_logits", "draft_token_ids", "cu_num_draft"),
        *_columns("repetition", "presence", "frequency", "slot", "token_counts"),
        *_columns("cu_bias", "bias_token_ids", "bias_values"),
        *_columns("cu_mask", "mask_token_ids"),
        *_columns("y"),
    )


class SampleParams(CParams):
    """Twin of fdsd::SampleParams; the fields of its Drafts in their order."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_processed", ctypes.c_int32),
        *_columns("logits", "processed", "processed_row", "batch_id_per_output", "positions"),
        *_columns("temperature", "top_k", "top_p", "min_p", "seed"),
        *_columns("token_ids"),
        *_columns("cu_num_logits", "draft_token_ids", "cu_num_draft"),
    )


class TopPCandidatesParams(CParams):
    """Twin of fdsd::TopPCandidatesParams."""

    _fields_ = (
        ("rows", SampleParams),
        ("max_candidate_len", ctypes.c_int32),
        *_columns("candidate_token_ids", "candidate_lens"),
    )


class TokenLogprobsParams(CParams):
    """Twin of fdsd::TokenLogprobsParams."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_top", ctypes.c_int32),
        *_columns("logits", "token_ids"),
        *_columns("logprobs", "ranks", "top_token_ids", "top_logprobs"),
    )


def process_logits(logits: F32, rows: I32, cu_num_logits: I32, draft: DraftTokens, sampling: SamplingArrays) -> F32:
    """See `reference.sampling.process_logits`.

    Raises:
        ValueError: a shape, dtype or offset disagrees, a row is none, or a token id is outside the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    num_requests, num_slots = len(sampling.seed), len(sampling.token_counts)
    num_bias, num_mask = int(sampling.cu_bias[-1]), int(sampling.cu_mask[-1])
    per_request = (num_requests,)
    y = np.empty((len(rows), vocab_size), np.float32)
    params = ProcessLogitsParams(
        num_rows,
        len(rows),
        num_requests,
        vocab_size,
        num_slots,
        pointer("logits", logits, (num_rows, vocab_size), np.float32),
        pointer("rows", rows, (len(rows),), np.int32),
        pointer("cu_num_logits", cu_num_logits, (num_requests + 1,), np.int32),
        pointer("draft_token_ids", draft.token_ids, (int(draft.cu_num_draft[-1]),), np.int32),
        pointer("cu_num_draft", draft.cu_num_draft, (num_requests + 1,), np.int32),
        pointer("repetition_penalty", sampling.repetition_penalty, per_request, np.float32),
        pointer("presence_penalty", sampling.presence_penalty, per_request, np.float32),
        pointer("frequency_penalty", sampling.frequency_penalty, per_request, np.float32),
        pointer("penalty_slot", sampling.penalty_slot, per_request, np.int32),
        pointer("token_counts", sampling.token_counts, (num_slots, vocab_size), np.int32),
        pointer("cu_bias", sampling.cu_bias, (num_requests + 1,), np.int32),
        pointer("bias_token_ids", sampling.bias_token_ids, (num_bias,), np.int32),
        pointer("bias_values", sampling.bias_values, (num_bias,), np.float32),
        pointer("cu_mask", sampling.cu_mask, (num_rows + 1,), np.int32),
        pointer("mask_token_ids", sampling.mask_token_ids, (num_mask,), np.int32),
        address(y),
    )
    call("process_logits", params)
    return y


def sample(
    logits: F32,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    processed: ProcessedLogits[F32] | None = None,
    drafted: DraftedRows | None = None,
) -> I32:
    """See `reference.sampling.sample`.

    Raises:
        ValueError: a shape, dtype or offset disagrees, or a parameter is out of its range.
    """
    token_ids = np.empty(len(logits), np.int32)
    params = _sample_params(logits, batch_id_per_output, positions, sampling, token_ids, processed)
    if drafted is not None:
        draft, per_request = drafted.draft, (len(sampling.seed) + 1,)
        params.cu_num_logits = pointer("cu_num_logits", drafted.cu_num_logits, per_request, np.int32)
        params.cu_num_draft = pointer("cu_num_draft", draft.cu_num_draft, per_request, np.int32)
        num_draft = (int(draft.cu_num_draft[-1]),)
        params.draft_token_ids = pointer("draft_token_ids", draft.token_ids, num_draft, np.int32)
    call("sample", params)
    return token_ids


def top_p_candidates(
    logits: F32,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    max_candidate_len: int,
    processed: ProcessedLogits[F32] | None = None,
) -> tuple[I32, I32, I32]:
    """See `reference.sampling.top_p_candidates`.

    Raises:
        ValueError: a shape or dtype disagrees, a parameter is out of its range, or max_candidate_len is below 1.
    """
    num_rows = len(logits)
    token_ids, candidate_lens = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    candidate_token_ids = np.empty((num_rows, max(max_candidate_len, 0)), np.int32)
    params = TopPCandidatesParams(
        _sample_params(logits, batch_id_per_output, positions, sampling, token_ids, processed),
        max_candidate_len,
        address(candidate_token_ids),
        address(candidate_lens),
    )
    call("top_p_candidates", params)
    return token_ids, candidate_token_ids, candidate_lens


def _sample_params(
    logits: F32,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    token_ids: I32,
    processed: ProcessedLogits[F32] | None,
) -> SampleParams:
    num_rows, vocab_size = logits.shape
    per_request = (len(sampling.seed),)
    num_processed = 0 if processed is None else len(processed.logits)
    replacing, row_of = (None, None) if processed is None else (processed.logits, processed.row_of)
    return SampleParams(
        num_rows,
        len(sampling.seed),
        vocab_size,
        num_processed,
        pointer("logits", logits, (num_rows, vocab_size), np.float32),
        pointer("processed", replacing, (num_processed, vocab_size), np.float32),
        pointer("processed_row", row_of, (num_rows,), np.int32),
        pointer("batch_id_per_output", batch_id_per_output, (num_rows,), np.int32),
        pointer("positions", positions, (num_rows,), np.int32),
        pointer("temperature", sampling.temperature, per_request, np.float32),
        pointer("top_k", sampling.top_k, per_request, np.int32),
        pointer("top_p", sampling.top_p, per_request, np.float32),
        pointer("min_p", sampling.min_p, per_request, np.float32),
        pointer("seed", sampling.seed, per_request, np.uint64),
        address(token_ids),
    )


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
