"""What a step does with the recurrent states of its requests."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_sd.types.arrays import I32, Rows, take_rows

LIVE_STATE, NO_STATE = -2, -1  # of StatePlan.initial


@dataclass(frozen=True, slots=True, eq=False)
class StatePlan:
    """What a step does with recurrent states: where each row's begins, and what is kept of them.

    Attributes:
        initial: i32[R]: -2 = the request's own live state, -1 = none, as no token is before the step's, n >= 0 =
            snapshot n of the pool, only in a request's first step.
        cu_snapshots: i32[R+1], row r owns snapshots [c[r], c[r+1]).
        snapshot_ends: i32[n], how many of the request's tokens a snapshot holds; they rise in each row.
        snapshot_ids: i32[n], where in the pool it is put.
    """

    initial: I32
    cu_snapshots: I32
    snapshot_ends: I32
    snapshot_ids: I32

    def take(self, rows: Rows) -> StatePlan:
        """Return the plan of some rows, intp[n] ascending."""
        index, cu = take_rows(self.cu_snapshots, rows)
        return StatePlan(self.initial[rows], cu, self.snapshot_ends[index], self.snapshot_ids[index])
