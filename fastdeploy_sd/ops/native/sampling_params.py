"""The params structs of the sampling ops, field by field as in custom_ops/include/fdsd/sampling.h."""

from __future__ import annotations

import ctypes

from fastdeploy_sd.ops.library import CParams


def _columns(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


_DRAFTED = _columns("cu_num_logits", "draft_token_ids", "cu_num_draft")
_RULES = (
    *_columns("repetition", "presence", "frequency", "slot", "token_counts"),
    *_columns("cu_bias", "bias_token_ids", "bias_values", "cu_mask", "mask_token_ids"),
    ("num_slots", ctypes.c_int32),
)


class ProcessLogitsParams(CParams):
    """Twin of fdsd::ProcessLogitsParams; the fields of its DraftedRows and LogitsRules in their order."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_processed", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        *_columns("logits", "rows"),
        *_DRAFTED,
        *_RULES,
        *_columns("y"),
    )


class SampleParams(CParams):
    """Twin of fdsd::SampleParams; the fields of its DraftedRows and LogitsRules in their order."""

    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("stops_at_wrong_draft", ctypes.c_int32),
        *_columns("logits", "batch_id_per_output", "positions"),
        *_columns("temperature", "top_k", "top_p", "min_p", "seed"),
        *_columns("token_ids"),
        *_DRAFTED,
        *_RULES,
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
