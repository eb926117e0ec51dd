from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_sd.types import DraftSource, DraftTokens, LogprobArrays, VerifyResult, offsets
from tests.values import i32, rows_of


def ragged(
    *rows: list[int], source: DraftSource | None = None, num_top: int | None = None, parents: list[int] | None = None
) -> DraftTokens:
    flat = np.array([token_id for row in rows for token_id in row], np.int32)
    count = len(flat)
    return DraftTokens(
        flat,
        offsets(list(map(len, rows))),
        sources=None if source is None else np.full(count, source, np.int8),
        logprobs=None
        if num_top is None
        else LogprobArrays(
            logprobs=-flat.astype(np.float32),
            ranks=flat + 100,
            top_token_ids=np.tile(flat[:, None] * 10, (1, num_top)).astype(np.int32),
            top_logprobs=np.tile(-flat[:, None] * 10, (1, num_top)).astype(np.float32),
        ),
        parents=None if parents is None else np.array(parents, np.int32),
    )


def test_merged_rows_keep_the_order_of_the_parts() -> None:
    every = np.arange(3)
    merged = DraftTokens.merge(3, [(every, ragged([1], [2, 3], [])), (np.array([0, 2]), ragged([7, 8], [9]))])
    assert rows_of(merged) == [[1, 7, 8], [2, 3], [9]]
    assert merged.sources is None
    assert merged.logprobs is None
    assert {merged.token_ids.dtype, merged.cu_num_draft.dtype} == {np.dtype(np.int32)}


def test_rows_of_no_part_are_empty() -> None:
    merged = DraftTokens.merge(4, [(np.array([2]), ragged([5])), (np.array([1]), ragged([]))])
    assert rows_of(merged) == [[], [], [5], []]


def test_merged_sources_follow_their_drafts() -> None:
    parts = [ragged([1], [2], source=DraftSource.MTP), ragged([3, 4], [5], source=DraftSource.SUFFIX), ragged([], [6])]
    merged = DraftTokens.merge(2, [(np.arange(2), part) for part in parts])
    assert rows_of(merged) == [[1, 3, 4], [2, 5, 6]]
    assert merged.sources is not None
    mtp, suffix, custom = DraftSource.MTP, DraftSource.SUFFIX, DraftSource.CUSTOM
    assert merged.sources.tolist() == [mtp, suffix, suffix, mtp, suffix, custom]
    assert merged.sources.dtype == np.int8


def test_merged_logprobs_are_padded_to_the_widest() -> None:
    parts = [ragged([1], [2], num_top=1), ragged([3], []), ragged([], [4], num_top=2)]
    merged = DraftTokens.merge(2, [(np.arange(2), part) for part in parts])
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
    merged = DraftTokens.merge(1, [(np.arange(1), ragged([1], num_top=0)), (np.arange(1), ragged([2]))])
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
    assert rows_of(DraftTokens.merge(60, parts)) == want


def test_no_parts_are_no_drafts() -> None:
    assert rows_of(DraftTokens.merge(2, [])) == [[], []]


def test_taken_rows_keep_what_is_known_of_their_drafts() -> None:
    drafts = ragged([1, 2], [], [3], [4, 5], source=DraftSource.MTP, num_top=1, parents=[-1, 0, -1, -1, -1])
    taken = drafts.take(np.array([3, 1, 0]))
    assert rows_of(taken) == [[4, 5], [], [1, 2]]
    assert taken.sources is not None
    assert taken.logprobs is not None
    assert taken.parents is not None
    assert taken.sources.tolist() == [DraftSource.MTP] * 4
    assert taken.logprobs.ranks.tolist() == [104, 105, 101, 102]
    assert taken.parents.tolist() == [-1, -1, -1, 0]


def test_concatenated_drafts_name_the_parents_of_chains() -> None:
    joined = DraftTokens.concat([ragged([1, 2], [3]), ragged([4, 5, 6], parents=[-1, -1, 1])])
    assert rows_of(joined) == [[1, 2], [3], [4, 5, 6]]
    assert joined.parents is not None
    assert joined.parents.tolist() == [-1, 0, -1, -1, -1, 1]
    assert DraftTokens.concat([ragged([1, 2]), ragged([3])]).parents is None


def test_merged_drafts_follow_those_of_the_parts_before() -> None:
    head, tail = ragged([1, 2], [], [3], parents=[-1, -1, -1]), ragged([7, 8], [9])
    merged = DraftTokens.merge(3, [(np.arange(3), head), (np.array([0, 1]), tail)])
    assert rows_of(merged) == [[1, 2, 7, 8], [9], [3]]
    assert merged.parents is not None
    assert merged.parents.tolist() == [-1, -1, 1, 2, -1, -1]
    assert head.parents is not None
    assert head.parents.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("parents", "is_chain"),
    [(None, [True, True, True]), ([-1, 0, 1, -1], [True, True, True]), ([-1, -1, 1, -1], [False, True, True]),
     ([-1, 0, 1, 0], [True, True, False])],
)  # fmt: skip
def test_a_chain_is_known_by_its_parents(parents: list[int] | None, is_chain: list[bool]) -> None:
    assert ragged([1, 2, 3], [], [4], parents=parents).is_chain.tolist() == is_chain


#   a0 - b1 - d3        parents of the first row; the second one is a chain
#      \\ c2 - e4
TREE = [-1, 0, 0, 1, 2, -1, 0]


def test_a_path_goes_from_the_root_to_a_draft() -> None:
    drafts = ragged([1, 2, 3, 4, 5], [6, 7], parents=TREE)
    assert [drafts.path(0, i) for i in range(-1, 5)] == [[], [0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    assert drafts.path(1, 1) == ragged([8], [6, 7]).path(1, 1) == [0, 1]
    assert [list(d.parents_of(1)) for d in (drafts, ragged([8], [6, 7]))] == [[-1, 0]] * 2


def test_rows_of_logits_follow_those_of_their_parents() -> None:
    drafts = ragged([1, 2, 3, 4, 5], [], [6, 7], parents=TREE)
    found = drafts.parent_rows(np.array([0, 6, 6, 9], np.int32))
    assert found is not None
    assert found.tolist() == [-1, 0, 1, 1, 2, 3, -1, 0, 1]
    assert ragged([1]).parent_rows(np.array([0, 2], np.int32)) is None


def test_kept_drafts_follow_the_same_ones_as_before() -> None:
    drafts = ragged([1, 2, 3, 4, 5], [6, 7], parents=TREE)
    kept = drafts.keep(np.array([True, False, True, False, True, True, False]))
    assert rows_of(kept) == [[1, 3, 5], [6]]
    assert kept.parents is not None
    assert kept.parents.tolist() == [-1, 0, 1, -1]


def test_the_chain_of_a_tree_ends_where_it_branches() -> None:
    chains = ragged([1, 2, 3, 4, 5], [6, 7], [8], parents=[*TREE, -1]).chains()
    assert rows_of(chains) == [[1, 2], [6, 7], [8]]
    assert chains.parents is None


def test_merged_results_say_what_each_token_was_drawn_after() -> None:
    tree = VerifyResult(i32(5, 6, 7), i32(0, 3), i32(2), nodes=i32(0, 2, 4))
    chain = VerifyResult(i32(8, 9), i32(0, 2), i32(1))
    merged = VerifyResult.merge(3, [(np.array([2]), tree), (np.array([0]), chain)])
    assert merged.nodes is not None
    assert merged.nodes.tolist() == [0, 1, 0, 2, 4]
    assert [merged.accepted(r) for r in range(3)] == [[0], [], [1, 3]]
    assert chain.accepted(0) == [0]
    assert merged.take(np.array([2])).accepted(0) == [1, 3]
