"""Small values as tests write and read them."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.types import I32, DraftTokens


def i32(*values: int) -> I32:
    return np.array(values, np.int32)


def rows_of(drafts: DraftTokens) -> list[list[int]]:
    """The drafted ids of every row."""
    return [drafts.row(r).tolist() for r in range(len(drafts.cu_num_draft) - 1)]
