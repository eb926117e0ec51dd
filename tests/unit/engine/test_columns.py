from __future__ import annotations

import numpy as np

from fastdeploy_sd.engine.columns import RequestColumns
from fastdeploy_sd.engine.draft_tally import DraftTally
from fastdeploy_sd.types import DraftCounts


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_growth_keeps_what_the_rows_hold() -> None:
    columns = RequestColumns(2)
    rows = []
    for i in range(300):
        rows.append(columns.allocate())
        columns.num_tokens[rows[-1]] = i
        columns.outcomes[rows[-1], 3] = i
    assert len(set(rows)) == 300
    assert columns.num_tokens[rows].tolist() == columns.outcomes[rows, 3].tolist() == list(range(300))


def test_a_row_that_is_given_away_again_is_blank() -> None:
    columns = RequestColumns(1)
    row = columns.allocate()
    columns.num_drafts[row] = columns.num_emitted[row] = 5
    columns.outcomes[row] = 1
    columns.free(row)
    assert columns.allocate() == row
    assert not columns.num_drafts[row]
    assert not columns.num_emitted[row]
    assert not columns.outcomes[row].any()


def test_outcomes_become_the_tally_of_their_request() -> None:
    columns = RequestColumns(3)
    rows = np.array([columns.allocate() for _ in range(3)])
    columns.count_outcomes(rows, [3, 0, 2], [1, 0, 2], [2, 1, 3])
    columns.count_outcomes(rows[:1], [1], [1], [2])
    tallies = [DraftTally.of(columns.outcomes[row], int(columns.num_emitted[row])) for row in rows]
    assert tallies[0].counts() == DraftCounts(2, 4, drafted=(2, 1, 1), reached=(2, 1, 0), accepted=(2, 0, 0))
    assert tallies[1].counts() == DraftCounts()
    assert tallies[2].counts() == DraftCounts(1, 3, drafted=(1, 1), reached=(1, 1), accepted=(1, 1))
