"""The target's hidden rows that draft layers may still read after their step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.models.layers.attention import AttentionInputs
from fastdeploy_sd.ops.mtp import keep_hidden_
from fastdeploy_sd.ops.mtp_batch import HiddenStateBuffer
from fastdeploy_sd.worker.step.forward import OnHidden

_ROW_DTYPES: dict[paddle.dtype, npt.DTypeLike] = {
    paddle.float32: np.float32,
    paddle.bfloat16: np.uint16,
    paddle.float16: np.float16,
}


def allocate_kept_hidden(
    block_hidden: Sequence[Tensor], block_size: int, max_num_seqs: int, num_drafts: int
) -> list[HiddenStateBuffer[Tensor]]:
    """Return memory per hidden source, for hidden rows that full blocks do not hold.

    Draft layers compute a block's slots at the latest when the block is full. So a request needs the rows of its newest
    block, and of `num_drafts` drafts after it that may be rejected.

    Args:
        block_hidden: per source [num_blocks, H].
        max_num_seqs: table rows.
    """
    num_kept = block_size + num_drafts + 1
    kept = [device().zeros((max_num_seqs * num_kept, rows.shape[1]), _ROW_DTYPES[rows.dtype]) for rows in block_hidden]
    return [HiddenStateBuffer(*memory, block_size, num_kept) for memory in zip(block_hidden, kept, strict=True)]


def keeping(sources: Sequence[HiddenStateBuffer[Tensor]]) -> OnHidden | None:
    """Return the callback that keeps a pass's hidden rows in each of these; None = no sources."""

    def keep(maps: AttentionInputs, hidden: Tensor) -> None:
        for kept in sources:
            keep_hidden_(maps.blocks, maps, hidden, kept)

    return keep if sources else None
