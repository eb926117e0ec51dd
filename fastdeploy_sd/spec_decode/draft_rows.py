"""Some rows of a drafting step. Knows no method."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.types import Rows


def select_rows(x: ProposeInput, rows: Rows) -> ProposeInput:
    """Return the input of a method that runs no model and sees these rows only.

    Args:
        rows: intp[n], rising.

    Returns:
        Row i is row rows[i] of x; without `target`, whose ragged rows cannot be taken out.
    """
    return ProposeInput(
        request_ids=tuple(x.request_ids[r] for r in rows.tolist()),
        table_rows=x.table_rows[rows],
        token_table=x.token_table,
        num_tokens=x.num_tokens[rows],
        max_draft_len=x.max_draft_len[rows],
        num_draft_logprobs=None if x.num_draft_logprobs is None else x.num_draft_logprobs[rows],
        prefix=None if x.prefix is None else x.prefix.take(rows),
    )


def slice_rows(x: ProposeInput, begin: int, end: int) -> ProposeInput:
    """Return the input of rows begin .. end - 1 only, with what the model ran of them."""
    rows = np.arange(begin, end)
    target = x.target
    if target is not None:
        # Offsets into the step's hidden rows stay: these do not move.
        target = TargetStep(
            query_start_loc=target.query_start_loc[begin : end + 1],
            num_computed_tokens=target.num_computed_tokens[begin:end],
            num_valid=target.num_valid[begin:end],
            num_kv_slots=target.num_kv_slots[begin:end],
        )
    return replace(select_rows(x, rows), target=target)
