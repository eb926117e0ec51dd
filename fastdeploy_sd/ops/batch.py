"""prepare_batch and gather_output_rows on Paddle tensors.

An engine that keeps its token table on the host calls `native.batch.prepare_batch`, which copies nothing.
"""

from __future__ import annotations

import numpy as np
from paddle import Tensor

from fastdeploy_sd.ops import shim
from fastdeploy_sd.ops.native.batch import BatchRows
from fastdeploy_sd.ops.tensors import from_numpy
from fastdeploy_sd.types import I32


def prepare_batch(rows: BatchRows, token_table: Tensor, block_size: int) -> tuple[Tensor, ...]:
    """Build the virtual-padding maps of a step; see `reference.batch.prepare_batch`.

    Args:
        rows: what each request runs, on the host.
        token_table: i32[num_slots, max_tokens_per_row], the committed tokens of each slot.

    Returns:
        Tensors in the order of `BatchMaps`.

    Raises:
        ValueError: a shape or dtype disagrees, or the counts contradict each other or the blocks.
    """
    columns = [from_numpy(column) for column in (rows.num_computed, rows.num_new, rows.num_known)]
    ragged = (rows.slots, rows.draft.token_ids, rows.draft.cu_num_draft, rows.block_tables)
    inputs = [*columns, token_table, *(from_numpy(array) for array in ragged)]
    return tuple(shim.run("prepare_batch", *inputs, block_size, rows.num_tokens(), rows.num_logits()))


def gather_output_rows(x: Tensor, indices: Tensor | I32) -> Tensor:
    """Return the rows of x that need logits.

    Args:
        x: [T, H], any dtype.
        indices: i32[L], rows of x, on the host or a tensor.

    Returns:
        [L, H] in x's dtype.

    Raises:
        ValueError: a shape or dtype disagrees, or an index is outside x.
    """
    (y,) = shim.run("gather_output_rows", x, from_numpy(indices) if isinstance(indices, np.ndarray) else indices)
    return y
