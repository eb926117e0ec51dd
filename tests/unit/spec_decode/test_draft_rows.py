from __future__ import annotations

import numpy as np

from fastdeploy_sd.spec_decode.draft_rows import merge_drafts, select_rows, slice_rows
from fastdeploy_sd.spec_decode.proposer import ProposeInput, TargetStep
from fastdeploy_sd.types import DraftSource, DraftTokens, LogprobArrays


def ragged(*rows: list[int], source: DraftSource | None = None, num_top: int | None = None) -> DraftTokens:
    flat = np.array([token_id for row in rows for token_id in row], np.int32)
    count = len(flat)
    return DraftTokens(
        flat,
        np.cumsum([0, *map(len, rows)]).astype(np.int32),
        sources=None if source is None else np.full(count, source, np.int8),
        logprobs=None
        if num_top is None
        else LogprobArrays(
            logprobs=-flat.astype(np.float32),
            ranks=flat + 100,
            top_token_ids=np.tile(flat[:, None] * 10, (1, num_top)).astype(np.int32),
            top_logprobs=np.tile(-flat[:, None] * 10, (1, num_top)).astype(np.float32),
        ),
    )


def rows_of(drafts: DraftTokens) -> list[list[int]]:
    return [drafts.row(r).tolist() for r in range(len(drafts.cu_num_draft) - 1)]


def test_selected_rows_keep_their_columns_and_prefix() -> None:
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    column = np.array([1, 2, 3, 4], np.int32)
    x = ProposeInput(
        request_ids=("a", "b", "c", "d"),
        slots=np.array([3, 1, 0, 2], np.int32),
        token_table=table,
        num_tokens=column,
        max_draft_len=column * 10,
        num_draft_logprobs=column - 2,
        prefix=ragged([1, 2], [3], [], [4, 5, 6]),
        target=TargetStep(column, column, column, table, column, None),
    )
    y = select_rows(x, np.array([1, 2, 3]))
    assert y.request_ids == ("b", "c", "d")
    texts = [y.token_table[slot, :n].tolist() for slot, n in zip(y.slots, y.num_tokens, strict=True)]
    assert texts == [[10, 11], [0, 1, 2], [20, 21, 22, 23]]
    assert y.max_draft_len.tolist() == [20, 30, 40]
    assert y.num_draft_logprobs is not None
    assert y.num_draft_logprobs.tolist() == [0, 1, 2]
    assert y.prefix is not None
    assert rows_of(y.prefix) == [[3], [], [4, 5, 6]]
    assert y.target is None
    assert {y.slots.dtype, y.num_tokens.dtype, y.prefix.token_ids.dtype, y.prefix.cu_num_draft.dtype} == {
        np.dtype(np.int32)
    }


def test_a_slice_of_rows_keeps_what_the_model_ran_of_them() -> None:
    table = np.arange(40, dtype=np.int32).reshape(4, 10)
    column, hidden = np.array([1, 2, 3, 4], np.int32), np.arange(20).reshape(10, 2)
    offsets = np.cumsum([0, *column], dtype=np.int32)
    target = TargetStep(offsets, column + 1, column + 2, table, column + 3, hidden)
    x = ProposeInput(("a", "b", "c", "d"), np.array([3, 1, 0, 2], np.int32), table, column, column, target=target)
    y = slice_rows(x, 1, 3)
    assert (y.request_ids, y.slots.tolist()) == (("b", "c"), [1, 0])
    part = y.target
    assert part is not None
    assert part.query_start_loc.tolist() == [0, 2, 5]
    assert (part.num_computed_tokens.tolist(), part.num_valid.tolist()) == ([3, 4], [4, 5])
    assert (part.num_kv_slots.tolist(), part.block_table is table) == ([5, 6], True)
    np.testing.assert_array_equal(part.hidden, hidden[1:6])  # type: ignore[arg-type]


def test_merged_rows_keep_the_order_of_the_parts() -> None:
    every = np.arange(3)
    merged = merge_drafts(3, [(every, ragged([1], [2, 3], [])), (np.array([0, 2]), ragged([7, 8], [9]))])
    assert rows_of(merged) == [[1, 7, 8], [2, 3], [9]]
    assert merged.sources is None
    assert merged.logprobs is None
    assert (merged.token_ids.dtype, merged.cu_num_draft.dtype) == (np.int32, np.int32)


def test_rows_of_no_part_are_empty() -> None:
    merged = merge_drafts(4, [(np.array([2]), ragged([5])), (np.array([1]), ragged([]))])
    assert rows_of(merged) == [[], [], [5], []]


def test_merged_sources_follow_their_drafts() -> None:
    parts = [ragged([1], [2], source=DraftSource.MTP), ragged([3, 4], [5], source=DraftSource.SUFFIX), ragged([], [6])]
    merged = merge_drafts(2, [(np.arange(2), part) for part in parts])
    assert rows_of(merged) == [[1, 3, 4], [2, 5, 6]]
    assert merged.sources is not None
    mtp, suffix, custom = DraftSource.MTP, DraftSource.SUFFIX, DraftSource.CUSTOM
    assert merged.sources.tolist() == [mtp, suffix, suffix, mtp, suffix, custom]
    assert merged.sources.dtype == np.int8


def test_merged_logprobs_are_padded_to_the_widest() -> None:
    parts = [ragged([1], [2], num_top=1), ragged([3], []), ragged([], [4], num_top=2)]
    merged = merge_drafts(2, [(np.arange(2), part) for part in parts])
    assert rows_of(merged) == [[1, 3], [2, 4]]
    found = merged.logprobs
    assert found is not None
    nan = np.nan
    np.testing.assert_array_equal(found.logprobs, np.array([-1, nan, -2, -4], np.float32))
    assert found.ranks.tolist() == [101, 0, 102, 104]
    assert found.top_token_ids.tolist() == [[10, 0], [0, 0], [20, 0], [40, 40]]
    np.testing.assert_array_equal(found.top_logprobs, [[-10, nan], [nan, nan], [-20, nan], [-40, -40]])
    assert [a.dtype for a in (found.logprobs, found.ranks, found.top_token_ids, found.top_logprobs)] == [
        np.float32,
        np.int32,
        np.int32,
        np.float32,
    ]


def test_logprobs_without_alternatives_stay_without() -> None:
    merged = merge_drafts(1, [(np.arange(1), ragged([1], num_top=0)), (np.arange(1), ragged([2]))])
    assert merged.logprobs is not None
    assert merged.logprobs.top_token_ids.shape == (2, 0)
    np.testing.assert_array_equal(merged.logprobs.logprobs, np.array([-1, np.nan], np.float32))


def test_many_ragged_rows_are_laid_end_to_end() -> None:
    rng = np.random.default_rng(0)
    parts = []
    want: list[list[int]] = [[] for _ in range(60)]
    for _ in range(3):
        rows = np.flatnonzero(rng.random(60) < 0.7)
        drafts = [rng.integers(0, 1000, rng.integers(0, 5)).tolist() for _ in rows]
        for row, more in zip(rows.tolist(), drafts, strict=True):
            want[row] += more
        parts.append((rows, ragged(*drafts)))
    assert rows_of(merge_drafts(60, parts)) == want
