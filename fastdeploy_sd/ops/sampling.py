"""process_logits, sample, top_p_candidates and token_logprobs: their declarations, and calls on NumPy arrays."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np

from fastdeploy_sd.device.device_buffers import RowsOnDevice
from fastdeploy_sd.device.library import library
from fastdeploy_sd.device.program import declaration as d
from fastdeploy_sd.device.program.declaration import Attr, In, Out, Part
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.ops.candidates import DraftedRows
from fastdeploy_sd.types import EMPTY_I32, F32, I32, DraftTokens, Rows, SamplingArrays

_RULES = {
    "table_rows": In(d.I32, "num_requests"),
    "repetition_penalty": In(d.F32, "num_table_rows"),
    "presence_penalty": In(d.F32, "num_table_rows"),
    "frequency_penalty": In(d.F32, "num_table_rows"),
    "count_rows": In(d.I32, "num_table_rows"),
    "token_counts": In(d.I32, "num_count_rows, vocab_size"),
    "num_bias": In(d.I32, "num_table_rows"),
    "bias_token_ids": In(d.I32, "num_table_rows, max_num_bias"),
    "bias_values": In(d.F32, "num_table_rows, max_num_bias"),
    "cu_mask": In(d.I32, "num_rows + 1"),
    "mask_token_ids": In(d.I32, "num_masked"),
    "allowed_rows": In(d.I32, "num_rows"),
    "allowed_bits": In(d.I32, "num_allowed, num_allowed_words"),
}
_FILTERS = {
    "temperature": In(d.F32, "num_table_rows"),
    "top_k": In(d.I32, "num_table_rows"),
    "top_p": In(d.F32, "num_table_rows"),
    "min_p": In(d.F32, "num_table_rows"),
    "seed": In(d.U64, "num_table_rows"),
}
_DRAFTED = {
    "cu_num_logits": In(d.I32, "num_requests + 1", optional=True),
    "draft_token_ids": In(d.I32, "num_drafts"),
    "cu_num_draft": In(d.I32, "num_requests + 1", optional=True),
}
_ROWS: dict[str, Part] = {
    "logits": In(d.F32, "num_rows, vocab_size"),
    "batch_id_per_output": In(d.I32, "num_rows"),
    "positions": In(d.I32, "num_rows"),
    **_RULES,
    **_FILTERS,
    **_DRAFTED,
    "stops_at_wrong_draft": Attr(bool),
}

PROCESS_LOGITS = HostOp(
    "process_logits",
    logits=In(d.F32, "num_rows, vocab_size"),
    rows=In(d.I32, "num_processed"),
    **_RULES,
    **_DRAFTED,
    y=Out(d.F32, "num_processed, vocab_size"),
)
SAMPLE = HostOp("sample", **_ROWS, token_ids=Out(d.I32, "num_rows"))
TOP_P_CANDIDATES = HostOp(
    "top_p_candidates",
    **_ROWS,
    max_candidate_len=Attr(int),
    token_ids=Out(d.I32, "num_rows"),
    candidate_token_ids=Out(d.I32, "num_rows, max_candidate_len"),
    candidate_lens=Out(d.I32, "num_rows"),
)
TOKEN_LOGPROBS = HostOp(
    "token_logprobs",
    logits=In(d.F32, "num_logits, vocab_size"),
    rows=In(d.I32, "num_rows"),
    token_ids=In(d.I32, "num_rows"),
    num_top=Attr(int),
    logprobs=Out(d.F32, "num_rows"),
    ranks=Out(d.I32, "num_rows"),
    top_token_ids=Out(d.I32, "num_rows, num_top"),
    top_logprobs=Out(d.F32, "num_rows, num_top"),
)


def settings_of(sampling: SamplingArrays) -> dict[str, Any]:
    """Return the arguments of `sample` and `top_p_candidates` that are columns of `sampling`."""
    return {name: getattr(sampling, name) for name in (*_RULES, *_FILTERS)}


def sample(
    logits: F32,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    drafted: DraftedRows | None = None,
) -> I32:
    """See `reference.sampling.sample`.

    Raises:
        ValueError: a shape, dtype or offset disagrees, or a parameter is out of its range.
    """
    rows = {"logits": logits, "batch_id_per_output": batch_id_per_output, "positions": positions}
    stops = drafted is not None and drafted.is_verified
    token_ids = SAMPLE(**rows, **settings_of(sampling), **_drafted(drafted), stops_at_wrong_draft=stops)
    return cast("I32", token_ids)


def top_p_candidates(
    logits: F32,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    max_candidate_len: int,
    drafted: DraftedRows | None = None,
) -> tuple[I32, I32, I32]:
    """See `reference.sampling.top_p_candidates`.

    Raises:
        ValueError: a shape or dtype disagrees, a parameter is out of its range, or max_candidate_len is below 1.
    """
    rows = {"logits": logits, "batch_id_per_output": batch_id_per_output, "positions": positions}
    settings = settings_of(sampling) | {"stops_at_wrong_draft": False, "max_candidate_len": max_candidate_len}
    found = TOP_P_CANDIDATES(**rows, **settings, **_drafted(drafted))
    return cast("tuple[I32, I32, I32]", found)


def process_logits(logits: F32, rows: I32, cu_num_logits: I32, draft: DraftTokens, sampling: SamplingArrays) -> F32:
    """See `reference.sampling.process_logits`; sampling does the same to the rows it looks at.

    Raises:
        ValueError: a shape, dtype or offset disagrees, a row is none, or a token id is outside the vocabulary.
    """
    rules = {name: getattr(sampling, name) for name in _RULES}
    y = PROCESS_LOGITS(logits=logits, rows=rows, **rules, **_drafted(DraftedRows(cu_num_logits, draft)))
    return cast("F32", y)


def token_logprobs(logits: F32 | RowsOnDevice, rows: Rows, token_ids: I32, num_top: int) -> tuple[F32, I32, I32, F32]:
    """See `reference.sampling.token_logprobs`. Rows on a device are looked at there.

    Raises:
        ValueError: a shape or dtype disagrees, a row is none, a token id is outside the vocabulary, or num_top exceeds
            it.
    """
    if isinstance(logits, RowsOnDevice):
        return logits.logprobs(rows, token_ids, num_top)
    found = TOKEN_LOGPROBS(logits=logits, rows=rows.astype(np.int32), token_ids=token_ids, num_top=num_top)
    return cast("tuple[F32, I32, I32, F32]", found)


def philox_uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position` of a request with `seed`."""
    function = library().fdsd_philox_uniform
    function.restype = ctypes.c_double
    return float(function(ctypes.c_uint64(seed), ctypes.c_uint32(position)))


def _drafted(drafted: DraftedRows | None) -> dict[str, Any]:
    if drafted is None:
        return {"draft_token_ids": EMPTY_I32}
    draft = drafted.draft
    return {
        "cu_num_logits": drafted.cu_num_logits,
        "draft_token_ids": draft.token_ids,
        "cu_num_draft": draft.cu_num_draft,
    }
