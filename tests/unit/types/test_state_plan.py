"""Plans of recurrent states: rows of one are taken with their snapshots."""

from __future__ import annotations

import numpy as np

from fastdeploy_sd.types import LIVE_STATE, NO_STATE, StatePlan


def test_taken_rows_keep_their_snapshots() -> None:
    plan = StatePlan(*(np.array(x, np.int32) for x in ([NO_STATE, LIVE_STATE, 3], [0, 2, 2, 3], [4, 8, 12], [5, 1, 0])))
    taken = plan.take(np.array([0, 2], np.intp))
    assert taken.initial.tolist() == [NO_STATE, 3]
    assert taken.cu_snapshots.tolist() == [0, 2, 3]
    assert (taken.snapshot_ends.tolist(), taken.snapshot_ids.tolist()) == ([4, 8, 12], [5, 1, 0])
