from __future__ import annotations

from fastdeploy_sd.engine.requests.request_counters import RequestCounters


def test_growth_keeps_what_the_rows_hold() -> None:
    counters = RequestCounters()
    rows = []
    for i in range(300):
        rows.append(counters.allocate())
        counters.num_tokens[rows[-1]] = i
    assert len(set(rows)) == 300
    assert counters.num_tokens[rows].tolist() == list(range(300))


def test_a_row_that_is_given_away_again_is_blank() -> None:
    counters = RequestCounters()
    row = counters.allocate()
    counters.num_drafts[row] = counters.draft_begin[row] = 5
    counters.free(row)
    assert counters.allocate() == row
    assert not counters.num_drafts[row]
    assert not counters.draft_begin[row]
