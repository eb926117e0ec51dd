"""Draft layers on a GPU, chained without the host: it makes room for the most rows there can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastdeploy_sd.ops import mtp as ops
from fastdeploy_sd.ops.reference import mtp as reference
from tests.ops.cases.case import OpCases, arrays
from tests.ops.cases.mtp import MTP_POSTPROCESS, MTP_PREPROCESS
from tests.ops.cuda_device import emulated

pytestmark = pytest.mark.slow

MORE = 3


@pytest.mark.parametrize("name", ["2-block16-step0", "2-block16-step3", "4-block64-step1"])
def test_rows_that_no_request_wants_any_more_are_skipped_and_filled_up(name: str) -> None:
    """Those of the pass before belong to no request; those of the next one store no KV."""
    case, expected = (OpCases.copied(MTP_POSTPROCESS.inputs[name]) for _ in range(2))
    logits, hidden = (np.concatenate([case[rows], case[rows][:1].repeat(MORE, 0)]) for rows in ("logits", "hidden"))
    batch = replace(case["batch"], num_drafting=[n + MORE for n in case["batch"].num_drafting])
    with emulated().runs_ops():
        got = ops.mtp_postprocess_(batch, case["step"], logits, hidden)
    want = reference.mtp_postprocess_(**expected)
    count = int(got.num_continued[0])
    assert len(got.input_ids) >= count + MORE
    for g, w in zip(arrays((got.first(count),)), arrays((want,)), strict=True):
        np.testing.assert_array_equal(g, w)
    for column in ("draft_token_ids", "num_wanted"):
        np.testing.assert_array_equal(getattr(batch, column), getattr(expected["batch"], column))
    assert not got.input_ids[count:].any()
    assert not got.positions[count:].any()
    assert (got.slot_mapping[count:] == -1).all()


@pytest.mark.parametrize("name", ["random-0-block16-source0", "random-1-block32-source2", "decode-block16-masked11"])
def test_rows_behind_a_passs_own_are_filled(name: str) -> None:
    """As a graph runs more rows than a step has."""
    case, expected = (OpCases.copied(MTP_PREPROCESS.inputs[name]) for _ in range(2))
    batch, todo = case["batch"], case["todo"]
    more = replace(batch, num_drafting=[n + MORE for n in batch.num_drafting])
    with emulated().runs_ops():
        todo, block = replace(todo, num_tokens=todo.num_tokens + MORE), case.get("block")
        if block is not None:
            block = replace(block, num_drafts=block.num_drafts + MORE)
        got = ops.mtp_preprocess(more, todo, case["hidden"], block)
    want = reference.mtp_preprocess(**expected)
    for part in ("input_ids", "positions", "slot_mapping", "hidden", "draft_rows"):
        rows, own = getattr(got, part), getattr(want, part)
        assert len(rows) == len(own) + MORE
        np.testing.assert_array_equal(rows[: len(own)], own)
        assert (rows[len(own) :] == (-1 if part == "slot_mapping" else 0)).all()
    np.testing.assert_array_equal(got.query_start_loc, want.query_start_loc)
    np.testing.assert_array_equal(got.seq_lens, want.seq_lens)
