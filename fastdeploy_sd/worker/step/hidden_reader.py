"""Hidden rows of the target for draft models that read some: which a pass makes, and where the newest are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastdeploy_sd.device.device import device
from fastdeploy_sd.models.drafters.draft_model import FINAL_NORM, CombineHidden
from fastdeploy_sd.ops.mtp_batch import HiddenStateBuffer


@dataclass(frozen=True, slots=True, eq=False)
class HiddenReader:
    """A draft model that reads hidden rows of the target: which, what it makes of them, and where the newest are kept.

    `reads`, `combine`: see DraftWeights.reads and DraftModel.combine_hidden.
    """

    reads: tuple[int, ...]
    combine: CombineHidden | None
    kept: HiddenStateBuffer[Tensor]

    @property
    def has_own_rows(self) -> bool:
        """Whether its rows are others than those that the target's head reads."""
        return self.reads != (FINAL_NORM,)

    def rows_of(self, found: Mapping[int, Tensor]) -> Tensor:
        """Return its rows, of a pass's rows that are read by some."""
        rows = [found[layer] for layer in self.reads]
        return rows[0] if self.combine is None else self.combine(rows)


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
