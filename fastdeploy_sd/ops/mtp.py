"""mtp_preprocess_ and mtp_postprocess_ on Paddle tensors: hidden rows and logits stay on their device.

Per-request columns and the two tables come from the host, or are tensors already.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from paddle import Tensor

from fastdeploy_sd.ops import shim
from fastdeploy_sd.ops.native.mtp import DraftBatch, HiddenRows, MtpInputs, MtpPass, NextInputs
from fastdeploy_sd.ops.tensors import from_numpy

__all__ = ["DraftBatch", "HiddenRows", "MtpInputs", "MtpPass", "NextInputs", "mtp_postprocess_", "mtp_preprocess_"]


def mtp_preprocess_(batch: DraftBatch, todo: MtpPass, hidden: HiddenRows[Tensor]) -> MtpInputs:
    """Lay out one pass of a draft layer and keep the hidden rows that later steps need, in place.

    The meaning is `reference.mtp.mtp_preprocess_`.

    Returns:
        Tensors.

    Raises:
        ValueError: a shape or dtype disagrees, or counts, positions, blocks and offsets contradict each other; nothing
            is written then.
    """
    columns = (
        batch.slots,
        todo.begin,
        todo.end,
        todo.hidden_begin,
        todo.hidden_end,
        todo.cu_hidden,
        batch.num_committed,
        batch.cu_num_draft,
        batch.draft_token_ids,
        batch.token_table,
        batch.block_table,
    )
    inputs = (*_tensors(columns), hidden.step, hidden.blocks, hidden.requests)
    sizes = (batch.block_size, todo.source, todo.num_tokens(), batch.num_drafting(todo.source))
    return MtpInputs(*shim.run("mtp_preprocess", *inputs, *sizes)[: len(MtpInputs._fields)])


def mtp_postprocess_(batch: DraftBatch, step: int, logits: Tensor, hidden: Tensor) -> NextInputs:
    """Write draft `step` of every drafting request, in place, and lay out the pass that continues after it.

    The meaning is `reference.mtp.mtp_postprocess_`.

    Args:
        step: from 0.
        logits: f32[A, V], a row for every request with more than `step` drafts.
        hidden: [A, H], the draft layer's output that the next pass reads.

    Returns:
        Tensors.

    Raises:
        ValueError: a shape or dtype disagrees, or a request has no block for its next slot.
    """
    columns = (batch.slots, batch.num_committed, batch.cu_num_draft, batch.block_table)
    *inputs, draft_token_ids = _tensors((*columns, batch.draft_token_ids))
    sizes = (batch.block_size, step, batch.num_drafting(step + 1))
    return NextInputs(
        *shim.run("mtp_postprocess", *inputs, logits, hidden, draft_token_ids, *sizes)[: len(NextInputs._fields)]
    )


def _tensors(columns: tuple[Any, ...]) -> list[Tensor]:
    """Arrays as tensors, one tensor for an array that comes twice: Paddle frees memory by address, once."""
    made: dict[int, Tensor] = {}
    for column in columns:
        if id(column) not in made:
            made[id(column)] = from_numpy(column) if isinstance(column, np.ndarray) else column
    return [made[id(column)] for column in columns]
