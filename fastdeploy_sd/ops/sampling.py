"""process_logits, sample, top_p_candidates and token_logprobs: their declarations, and calls on NumPy arrays.

The meaning of each op is the function of its name in `reference.sampling`.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np

from fastdeploy_sd.device.device_buffers import RowsOnDevice
from fastdeploy_sd.device.library import returned
from fastdeploy_sd.device.program import declaration as d
from fastdeploy_sd.device.program.declaration import Attr, In, Out, Part, each
from fastdeploy_sd.device.program.host_op import HostOp
from fastdeploy_sd.ops.candidates import DraftedRows
from fastdeploy_sd.types import EMPTY_I32, F32, I32, DraftTokens, Rows, SamplingArrays

_RULES: dict[str, Part] = {
    "table_rows": In(d.I32, "num_requests"),
    **each(In(d.F32, "num_table_rows"), "repetition_penalty", "presence_penalty", "frequency_penalty"),
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
_DRAFTED: dict[str, Part] = {
    "cu_num_logits": In(d.I32, "num_requests + 1", optional=True),
    "draft_token_ids": In(d.I32, "num_drafts"),
    "cu_num_draft": In(d.I32, "num_requests + 1", optional=True),
    "parent_rows": In(d.I32, "num_rows", optional=True),
}
_ROWS: dict[str, Part] = {
    "logits": In(d.F32, "num_rows, vocab_size"),
    **each(In(d.I32, "num_rows"), "batch_id_per_output", "positions"),
    **_RULES,
    "temperature": In(d.F32, "num_table_rows"),
    "top_k": In(d.I32, "num_table_rows"),
    **each(In(d.F32, "num_table_rows"), "top_p", "min_p"),
    "seed": In(d.U64, "num_table_rows"),
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
    **each(In(d.I32, "num_rows"), "rows", "token_ids"),
    num_top=Attr(int),
    logprobs=Out(d.F32, "num_rows"),
    ranks=Out(d.I32, "num_rows"),
    top_token_ids=Out(d.I32, "num_rows, num_top"),
    top_logprobs=Out(d.F32, "num_rows, num_top"),
)


def sample(
    logits: F32, batch_id_per_output: I32, positions: I32, sampling: SamplingArrays, drafted: DraftedRows | None = None
) -> I32:
    """See `reference.sampling.sample`."""
    rows = {"logits": logits, "batch_id_per_output": batch_id_per_output, "positions": positions}
    stops = drafted is not None and drafted.is_verified
    token_ids = SAMPLE(**rows, **SAMPLE.arguments_in(sampling), **_drafted(drafted), stops_at_wrong_draft=stops)
    return cast("I32", token_ids)


def top_p_candidates(
    logits: F32,
    batch_id_per_output: I32,
    positions: I32,
    sampling: SamplingArrays,
    max_candidate_len: int,
    drafted: DraftedRows | None = None,
) -> tuple[I32, I32, I32]:
    """See `reference.sampling.top_p_candidates`; raises ValueError for a max_candidate_len below 1 too."""
    rows = {"logits": logits, "batch_id_per_output": batch_id_per_output, "positions": positions}
    settings = SAMPLE.arguments_in(sampling) | {"stops_at_wrong_draft": False, "max_candidate_len": max_candidate_len}
    found = TOP_P_CANDIDATES(**rows, **settings, **_drafted(drafted))
    return cast("tuple[I32, I32, I32]", found)


def process_logits(logits: F32, rows: I32, cu_num_logits: I32, draft: DraftTokens, sampling: SamplingArrays) -> F32:
    """See `reference.sampling.process_logits`; sampling does the same to the rows it looks at."""
    rules, drafted = PROCESS_LOGITS.arguments_in(sampling), _drafted(DraftedRows(cu_num_logits, draft))
    return cast("F32", PROCESS_LOGITS(logits=logits, rows=rows, **rules, **drafted))


def token_logprobs(logits: F32 | RowsOnDevice, rows: Rows, token_ids: I32, num_top: int) -> tuple[F32, I32, I32, F32]:
    """See `reference.sampling.token_logprobs`. Rows on a device are looked at there."""
    if isinstance(logits, RowsOnDevice):
        return logits.logprobs(rows, token_ids, num_top)
    found = TOKEN_LOGPROBS(logits=logits, rows=rows.astype(np.int32), token_ids=token_ids, num_top=num_top)
    return cast("tuple[F32, I32, I32, F32]", found)


def philox_uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position` of a request with `seed`."""
    return float(returned("philox_uniform", ctypes.c_double, ctypes.c_uint64(seed), ctypes.c_uint32(position)))


def _drafted(drafted: DraftedRows | None) -> dict[str, Any]:
    if drafted is None:
        return {"draft_token_ids": EMPTY_I32}
    draft = drafted.draft
    tokens = {"draft_token_ids": draft.token_ids, "cu_num_draft": draft.cu_num_draft}
    parent_rows = draft.parent_rows(drafted.cu_num_logits)
    return {"cu_num_logits": drafted.cu_num_logits, "parent_rows": parent_rows, **tokens}
