"""What the MTP ops refuse, and that they refuse it before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.ops.mtp import MTP_COLLECT, MTP_PLAN, keep_hidden_, mtp_postprocess_, mtp_preprocess
from fastdeploy_sd.ops.mtp_batch import HiddenRows
from tests.ops.cases.mtp import keep_case, make_batch, preprocess_case
from tests.ops.cases.mtp_plan import ROWS, plan_case

I32 = np.int32


def changed(array: np.ndarray, index: int, value: int) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size: expected a positive number"),
        ({"num_steps": -1}, "num_steps: expected >= 0"),
        ({"num_more": -1}, "num_more: expected >= 0"),
        ({"num_steps": 4}, "num_drafting: expected more than num_steps and layers"),
        ({"num_drafting": np.zeros(5, I32), "num_steps": 4}, "draft_token_ids: expected room for num_steps drafts"),
        ({"ends": np.zeros((1, 1), I32)}, "ends: expected a column for every request"),
        ({"ends": np.zeros((0, 2), I32), "num_tokens": np.zeros(0, I32)}, "ends: expected a row for every layer"),
        ({"table_rows": np.array([0, 4], I32)}, "table_rows: expected rows of next_slot"),
        ({"num_valid": np.zeros(3, I32)}, r"num_valid: expected shape \[2\], got \[3\]"),
    ],
)
def test_a_plan_refuses_contradictions_and_then_writes_nothing(changes: dict[str, Any], message: str) -> None:
    given = plan_case(np.random.default_rng(1), ROWS["decode"][:2], 3, 1)
    del given["num_layers"]
    lengths = {"begin": 2, "num_wanted": 2, "cu_num_draft": 3, "draft_start_loc": 3, "draft_token_ids": 6}
    lengths |= {"num_filling": 1, "num_tokens": 1, "num_drafting": 4}
    out = {name: np.full(length, -7, I32) for name, length in lengths.items()} | {"ends": np.full((1, 2), -7, I32)}
    with pytest.raises(ValueError, match=message):
        MTP_PLAN.bind(**{**given, **out, **changes}).run()
    assert all((array == -7).all() for array in out.values())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cu_num_draft", [0, 3, 2], "cu_num_draft: expected 0 and rising offsets"),
        ("cu_num_draft", [0, 2, 9], "cu_num_draft: expected at most num_drafts last"),
        ("table_rows", [0, 4], "table_rows: expected rows of next_slot"),
    ],
)
def test_collecting_refuses_contradictions_and_then_changes_nothing(name: str, value: list[int], message: str) -> None:
    given = {
        "table_rows": np.array([1, 0], I32),
        "begin": np.array([4, 4], I32),
        "end": np.array([5, 5], I32),
        "next_slot": np.full(4, 4, I32),
        "cu_num_draft": np.array([0, 2, 4], I32),
        "draft_token_ids": np.array([7, -1, 8, 9], I32),
        "draft_prob": np.ones(4, np.float32),
        name: np.array(value, I32),
    }
    before = {key: array.copy() for key, array in given.items()}
    with pytest.raises(ValueError, match=message):
        MTP_COLLECT(**given)
    for key, array in given.items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("todo", "begin", 0, "begin: expected >= 1"),
        ("todo", "end", 2, "end: expected >= begin"),
        ("todo", "end", 12, "end: expected committed tokens and known drafts only"),
        ("todo", "hidden_begin", -1, "hidden_begin: expected a position"),
        ("todo", "hidden_begin", 3, "hidden: expected a row for every slot"),
        ("todo", "hidden_begin", 31, "begin: expected slots whose hidden rows are kept"),
        ("todo", "cu_hidden", 17, "cu_hidden: expected rising offsets"),
        ("todo", "source", -1, "source: expected >= 0"),
        ("batch", "table_rows", 9, "table_rows: expected rows of token_table"),
        ("batch", "num_committed", 91, "num_committed: expected at most a row of token_table"),
        ("batch", "cu_num_draft", 1, "cu_num_draft: expected 0 and rising offsets"),
        ("batch", "block_size", 0, "block_size: expected a positive number"),
    ],
)
def test_preprocess_refuses_contradictions(part: str, name: str, value: int, message: str) -> None:
    case = preprocess_case(np.random.default_rng(1), [(9, 5, 1, 1, 11, 2), (3, 1, 1, 1, 5, 2)], 16, 0)
    old = getattr(case[part], name)
    new = value if isinstance(old, int) else changed(old, 0, value)
    with pytest.raises(ValueError, match=message):
        mtp_preprocess(**{**case, part: replace(case[part], **{name: new})})


def test_preprocess_refuses_slots_without_blocks_and_wrong_shapes() -> None:
    case = preprocess_case(np.random.default_rng(1), [(9, 9, 9, 1, 19, 0)], 16, 0)
    for value in (-1, 99):
        table = case["batch"].block_table.copy()
        table[case["batch"].table_rows[0], 1] = value
        with pytest.raises(ValueError, match="block_table: expected a block for every slot"):
            mtp_preprocess(**{**case, "batch": replace(case["batch"], block_table=table)})
    hidden: HiddenRows[Any] = case["hidden"]
    with pytest.raises(ValueError, match="block_hidden: expected shape"):
        mtp_preprocess(
            **{**case, "hidden": replace(hidden, kept=replace(hidden.kept, blocks=hidden.kept.blocks[:, :5].copy()))}
        )


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("blocks", "table_rows", 9, "table_rows: expected rows of block_table"),
        ("maps", "seq_lens", 4, "seq_lens: expected at least the request's rows"),
        ("maps", "seq_lens", 400, "block_table: expected blocks for every position"),
        ("maps", "query_start_loc", 1, "query_start_loc: expected 0 and rising offsets"),
        ("kept", "block_size", 0, "block_size: expected a positive number"),
        ("kept", "num_kept", 0, "num_kept: expected at least 1"),
    ],
)
def test_keeping_refuses_contradictions_and_then_keeps_nothing(part: str, name: str, value: int, message: str) -> None:
    case = keep_case(np.random.default_rng(1), [(9, 9, 1, 1, 11, 8), (3, 1, 1, 1, 5, 2)], 16, 20)
    given = case[part]
    old = getattr(given, name)
    new = value if isinstance(old, int) else changed(old, 0, value)
    bad = given._replace(**{name: new}) if hasattr(given, "_replace") else replace(given, **{name: new})
    before = [case["kept"].blocks.copy(), case["kept"].requests.copy()]
    if name == "num_kept":
        bad = replace(bad, requests=bad.requests[:0])
    with pytest.raises(ValueError, match=message):
        keep_hidden_(**{**case, part: bad})
    np.testing.assert_array_equal(case["kept"].blocks, before[0])
    np.testing.assert_array_equal(case["kept"].requests, before[1])


def test_postprocess_refuses_contradictions() -> None:
    batch = make_batch(np.random.default_rng(1), [(9, 1, 1, 1, 11, 2), (3, 1, 1, 1, 15, 3)], 16)
    logits, hidden = np.zeros((2, 8), np.float32), np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="logits: expected a row for every request that drafts"):
        mtp_postprocess_(batch, 0, logits[:1], hidden[:1])
    with pytest.raises(ValueError, match="step: expected >= 0"):
        mtp_postprocess_(batch, -1, logits, hidden)
    for min_prob in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="min_prob: expected a probability"):
            mtp_postprocess_(replace(batch, min_prob=min_prob), 0, logits, hidden)
    table = batch.block_table.copy()
    table[batch.table_rows[1], 1] = -1
    with pytest.raises(ValueError, match="block_table: expected a block for the next slot"):
        mtp_postprocess_(replace(batch, block_table=table), 1, logits, hidden)
    short = {name: getattr(batch, name)[:-1].copy() for name in ("draft_token_ids", "draft_prob")}
    with pytest.raises(ValueError, match="cu_num_draft: expected at most num_drafts last, got more"):
        mtp_postprocess_(replace(batch, **short), 0, logits, hidden)
    with pytest.raises(ValueError, match="num_wanted: expected at most the room for the request's drafts, got more"):
        mtp_postprocess_(replace(batch, num_wanted=batch.num_wanted + np.int32(1)), 0, logits, hidden)


def test_preprocess_refuses_fewer_drafts_than_the_offsets_say() -> None:
    case = preprocess_case(np.random.default_rng(1), [(9, 5, 1, 1, 11, 2), (3, 1, 1, 1, 5, 2)], 16, 0)
    short = replace(case["batch"], draft_token_ids=case["batch"].draft_token_ids[:-1].copy())
    with pytest.raises(ValueError, match="cu_num_draft: expected at most num_drafts last, got more"):
        mtp_preprocess(**{**case, "batch": short})
