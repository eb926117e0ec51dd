"""The n-gram proposer from step to step: what is bound once per object, and what each step gets of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.methods.ngram import NgramIndex
from tests.unit.spec_decode.ngram_reference import NUM_SLOTS
from tests.unit.spec_decode.test_ngram import good_step
from tests.values import i32


def test_drafts_outlive_the_step_that_made_them() -> None:
    """A request that a step leaves out keeps its drafts; the columns of a step may be those of the one before."""
    proposer, x = good_step()
    first = proposer.propose(x)
    x.num_tokens[:] = 4
    x.max_draft_len[:] = 3, 1
    second = proposer.propose(x)
    assert (first.token_ids.tolist(), first.cu_num_draft.tolist()) == ([2, 1, 2, 1], [0, 2, 4])
    assert (second.token_ids.tolist(), second.cu_num_draft.tolist()) == ([1, 2, 1, 1], [0, 3, 4])


def test_rows_after_refused_ones_are_read_anew() -> None:
    proposer, x = good_step()
    before = proposer.propose(x)
    with pytest.raises(ValueError, match="max_draft_len: expected contiguous"):
        proposer.propose(replace(x, table_rows=i32(1, 0), num_tokens=i32(4, 4), max_draft_len=i32(2)))
    after = proposer.propose(x)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    proposer.index.check_integrity(x.token_table)
    x.num_tokens[:] = 3, 4
    assert proposer.propose(x).token_ids.tolist() == [2, 1, 1, 2]


def test_another_table_is_read_where_it_is() -> None:
    index = NgramIndex(NUM_SLOTS, 1, 5, 2.0, follows_copies=True)
    index.begin(i32(0, 1))
    _, x = good_step()
    index.propose(x)
    longer = np.concatenate([x.token_table, x.token_table[:, ::-1]], axis=1)
    x.num_tokens[:] = 6
    assert index.propose(replace(x, token_table=longer)).token_ids.tolist() == [2, 2, 2, 2]
    index.check_integrity(longer)


def test_there_is_room_for_more_drafts_than_in_the_step_before() -> None:
    proposer, x = good_step()
    for most in (0, 1, 200, 2, 5000):
        drafts = proposer.propose(replace(x, max_draft_len=i32(most, most)))
        row = ([2, 1] * 32)[:most]  # the text that agrees allows 64
        assert drafts.token_ids.tolist() == row * 2
