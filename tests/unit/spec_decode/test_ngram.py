"""The n-gram proposer against its rule written out, over random texts, commits, prefixes and table rows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdeploy_sd.spec_decode.methods.ngram import NgramIndex, NgramProposer
from fastdeploy_sd.spec_decode.proposer import DraftRequest, ProposeInput
from fastdeploy_sd.types import DraftTokens
from tests.unit.spec_decode.ngram_reference import (
    MAX_TOKENS,
    NUM_SLOTS,
    Rule,
    Texts,
    draft,
    drafts_by_definition,
    proposer_of,
)
from tests.values import i32

# ---- the rule -------------------------------------------------------------------------------------------------------


def test_copies_what_followed() -> None:
    assert draft([1, 2, 3, 4, 9, 8, 1, 2], 2) == [3, 4]


def test_most_recent_occurrence_wins() -> None:
    assert draft([1, 2, 3, 1, 2, 4, 1, 2], 1) == [4]


def test_longest_end_wins_over_a_more_recent_shorter_one() -> None:
    assert draft([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1) == [3]


def test_no_end_longer_than_the_maximum_is_looked_up() -> None:
    assert draft([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, rule=Rule(range(2, 3))) == [4]


def test_an_end_shorter_than_the_minimum_is_no_match() -> None:
    text = [1, 2, 3, 9, 2]
    assert draft(text, 3, rule=Rule(range(2, 4))) == []
    assert draft(text, 3, rule=Rule(range(1, 4))) == [3, 9, 2]


def test_a_repeated_phrase_is_repeated_as_long_as_allowed() -> None:
    assert draft([5, 5, 5], 7) == [5] * 7
    assert draft([1, 2, 3, 1, 2], 8) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_drafts_from_the_first_output_token_on_and_across_the_border_to_the_prompt() -> None:
    texts = Texts(proposer_of())
    texts.begin(0, [4, 5, 6, 7, 4], num_prompt_tokens=5)
    assert texts.step([0], [0]) == [[]]
    texts.append(0, [5])
    assert texts.step([0], [3]) == [[6, 7, 4]]


def test_a_prefix_is_part_of_the_text_and_comes_out_continued() -> None:
    text = [1, 2, 3, 4, 9, 1]
    assert draft(text, 2) == []
    assert draft(text, 2, prefix=[2]) == [3, 4]
    assert draft(text, 2, prefix=[2, 3, 4, 9]) == [1, 2]


def test_a_prefix_may_repeat_the_end_of_the_text() -> None:
    # The latest occurrence of 1 2 is where the committed tokens end: what follows it is the prefix, and then the draft.
    assert draft([1, 2, 8, 1, 2], 5, prefix=[1, 2]) == [1, 2, 1, 2, 1]


def test_occurrences_inside_the_prefix_do_not_count() -> None:
    assert draft([1, 2, 3, 9], 3, prefix=[6, 7, 6, 7]) == []


@pytest.mark.parametrize("text", [[], [1], [1, 1]])
def test_a_text_too_short_for_a_match_has_no_drafts(text: list[int]) -> None:
    assert draft(text, 4) == []


def test_any_token_id_is_an_ordinary_one() -> None:
    top = 2**31 - 1
    assert draft([top, 0, top, 3, top, 0], 2, rule=Rule(range(2, 3))) == [top, 3]


def test_drafts_are_limited_by_what_agreed() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert draft(text, 8, rule=Rule(max_factor=1.5)) == [3, 4, 5]
    assert draft([*text, 3], 8, rule=Rule(max_factor=1.5)) == [4, 5, 6, 7]


# ---- against the definition -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("alphabet", "sizes"), [(2, range(1, 4)), (3, range(2, 6)), (7, range(2, 4)), (3, range(4, 9))]
)
@pytest.mark.parametrize(("follows_copies", "max_factor"), [(False, 64.0), (True, 64.0), (True, 1.5)])
def test_random_steps_follow_the_definition(
    alphabet: int, sizes: range, follows_copies: bool, max_factor: float, seed: int
) -> None:
    rng = random.Random(f"{alphabet} {sizes} {seed}")
    rule = Rule(sizes, max_factor, follows_copies)
    texts = Texts(proposer_of(rule))

    def tokens(most: int) -> list[int]:
        return [rng.randrange(alphabet) for _ in range(rng.randint(0, most))]

    for _ in range(60):
        for table_row in range(NUM_SLOTS):
            if table_row not in texts.lengths and rng.random() < 0.6:
                texts.begin(table_row, [0, *tokens(rng.choice([3, 60]))])
            elif table_row in texts.lengths and (rng.random() < 0.05 or texts.lengths[table_row] > MAX_TOKENS - 8):
                texts.forget(table_row)
        table_rows = [table_row for table_row in texts.lengths if rng.random() < 0.8]
        rng.shuffle(table_rows)
        for table_row in table_rows:
            texts.append(table_row, tokens(4))
        allowed = [rng.choice([0, 0, 1, 2, 9]) for _ in table_rows]
        prefixes = [tokens(rng.choice([0, 6])) for _ in table_rows]
        if rng.random() < 0.5:
            prefixes = [[] for _ in table_rows]
        rows = zip(table_rows, prefixes, allowed, strict=True)
        want = [drafts_by_definition(texts.text(table_row), prefix, most, rule) for table_row, prefix, most in rows]
        assert texts.step(table_rows, allowed, prefixes if any(prefixes) else None) == want
        texts.proposer.index.check_integrity(texts.table)


def test_a_long_text_of_few_words_follows_the_definition() -> None:
    """Tables grow several times, in one step and token by token."""
    rng = random.Random(1)
    words = [[rng.randrange(50) for _ in range(rng.randint(2, 6))] for _ in range(12)]
    text = [token_id for _ in range(120) for token_id in rng.choice(words)][: MAX_TOKENS - 10]
    texts = Texts(proposer_of())
    texts.begin(0, text[:200])
    for token_id in text[200:]:
        assert texts.step([0], [6]) == [drafts_by_definition(texts.text(0), [], 6, Rule())]
        texts.append(0, [token_id])
    texts.proposer.index.check_integrity(texts.table)


# ---- state ----------------------------------------------------------------------------------------------------------


def test_rows_that_may_not_draft_are_indexed_all_the_same() -> None:
    texts = Texts(proposer_of())
    texts.begin(1, [1, 2, 3])
    for token_id in [4, 5, 6, 1, 2, 3]:
        texts.append(1, [token_id])
        assert texts.step([1], [0]) == [[]]
    texts.proposer.index.check_integrity(texts.table)
    assert texts.step([1], [3]) == [[4, 5, 6]]


def test_asking_again_gives_the_same_drafts() -> None:
    """Also after a step with a prefix, which sees one n-gram more."""
    texts = Texts(proposer_of())
    texts.begin(0, [1, 2, 3, 1, 2])
    first = texts.step([0], [4])
    texts.step([0], [4], [[3, 1]])
    assert texts.step([0], [4]) == first == [[3, 1, 2, 3]]


def test_a_request_that_comes_back_is_indexed_from_its_first_token() -> None:
    texts = Texts(proposer_of())
    texts.begin(0, [1, 2, 3, 4])
    texts.step([0], [2])
    texts.forget(0)
    texts.begin(0, [8, 8])
    assert texts.step([0], [2]) == [[]], "another request in the table row sees nothing of the first"
    texts.begin(2, [1, 2, 3, 4, 9, 1, 2], num_prompt_tokens=4)
    assert texts.step([2], [2]) == [[3, 4]]
    texts.proposer.index.check_integrity(texts.table)


def test_forgetting_frees_the_memory() -> None:
    texts = Texts(proposer_of())
    rng = random.Random(0)
    for table_row in (0, 4):
        texts.begin(table_row, [rng.randrange(1000) for _ in range(300)])
    texts.step([0, 4], [1, 1])
    used = texts.proposer.num_bytes()
    texts.forget(4)
    assert texts.proposer.num_bytes() == used // 2
    texts.forget(0)
    texts.forget(0)
    texts.forget(2)
    assert texts.proposer.num_bytes() == 0


@pytest.mark.parametrize("num_tokens", [1, 17, 130, 300, MAX_TOKENS])
def test_memory_is_at_most_16_bytes_per_token_and_size(num_tokens: int) -> None:
    texts = Texts(proposer_of())
    texts.begin(0, list(range(num_tokens)))
    texts.step([0], [0])
    assert texts.proposer.num_bytes() <= 4 * max(64, 16 * num_tokens)


def test_integrity_is_lost_when_the_text_changes() -> None:
    texts = Texts(proposer_of())
    texts.begin(0, list(range(20)))
    texts.step([0], [1])
    texts.proposer.index.check_integrity(texts.table)
    texts.table[0, 7] = 3
    with pytest.raises(ValueError, match=r"ngram_check_integrity: \w+: expected"):
        texts.proposer.index.check_integrity(texts.table)


# ---- refused arguments ----------------------------------------------------------------------------------------------


def good_step() -> tuple[NgramProposer, ProposeInput]:
    proposer = proposer_of(Rule(range(1, 6)))
    proposer.begin([DraftRequest("a", 0, 1, 3), DraftRequest("b", 1, 1, 3)])
    table = np.tile(i32(1, 2, 1, 2), (NUM_SLOTS, 1))
    return proposer, ProposeInput(("a", "b"), i32(0, 1), table, i32(3, 3), i32(2, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table_rows": i32(0, 2)}, "table_rows: expected table rows that were begun"),
        ({"table_rows": i32(0, -1)}, "table_rows: expected 0"),
        ({"table_rows": i32(0, NUM_SLOTS)}, "table_rows: expected 0"),
        ({"num_tokens": i32(4, 2)}, "num_tokens: expected no fewer"),
        ({"num_tokens": i32(3, -1)}, "num_tokens: expected no fewer"),
        ({"num_tokens": i32(4, 5)}, "num_tokens: expected at most a row"),
        ({"max_draft_len": i32(2, -1)}, "max_draft_len: expected >= 0"),
        ({"max_draft_len": i32(2)}, r"max_draft_len: expected contiguous int32\[2\]"),
        ({"num_tokens": np.array([3, 3], np.int64)}, "num_tokens: expected contiguous int32"),
        ({"token_table": np.zeros((1, 4), np.int32)}, "table_rows: expected rows of token_table"),
        ({"prefix": DraftTokens(i32(1), i32(0, 2, 1))}, "cu_num_prefix: expected rising"),
        ({"prefix": DraftTokens(i32(1), i32(1, 1, 1))}, "cu_num_prefix: expected to start at 0"),
        ({"prefix": DraftTokens(i32(1), i32(0, 1))}, r"cu_num_prefix: expected contiguous int32\[3\]"),
        ({"prefix": DraftTokens(i32(), i32(0, 1, 1))}, r"prefix_token_ids: expected contiguous int32\[1\]"),
    ],
)
def test_contradictory_rows_are_refused_and_change_nothing(changes: dict[str, Any], message: str) -> None:
    proposer, x = good_step()
    before = proposer.propose(x)
    with pytest.raises(ValueError, match=message):
        proposer.propose(replace(x, **changes))
    proposer.index.check_integrity(x.token_table)
    assert proposer.propose(x).token_ids.tolist() == before.token_ids.tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize("table_row", [-1, NUM_SLOTS])
def test_slots_out_of_range_are_refused(table_row: int) -> None:
    proposer = proposer_of()
    with pytest.raises(ValueError, match="table_rows: expected 0"):
        proposer.begin([DraftRequest("a", table_row, 1, 1)])
    with pytest.raises(ValueError, match="table_rows: expected 0"):
        proposer.forget(i32(0, table_row))


@pytest.mark.parametrize(
    ("num_table_rows", "lengths", "field"),
    [
        (-1, (1, 1, 2.0), "num_table_rows"),
        (1, (0, 1, 2.0), "min_n"),
        (1, (3, 2, 2.0), "min_n"),
        (1, (1, 1, 0.0), "max_factor"),
        (1, (1, 1, float("nan")), "max_factor"),
    ],
)
def test_an_index_of_nothing_is_refused(num_table_rows: int, lengths: tuple[int, int, float], field: str) -> None:
    with pytest.raises(ValueError, match=f"ngram_create: {field}: expected"):
        NgramIndex(num_table_rows, *lengths, follows_copies=True)


def test_a_table_row_twice_in_a_step_is_refused() -> None:
    """Rows are looked up at once, each in tables of its own."""
    proposer, table = proposer_of(), np.zeros((NUM_SLOTS, MAX_TOKENS), np.int32)
    proposer.begin([DraftRequest("a", 0, 4, 4)])
    x = ProposeInput(("a", "b"), np.zeros(2, np.int32), table, i32(4, 4), i32(1, 1))
    with pytest.raises(ValueError, match="table_rows: expected none twice"):
        proposer.propose(x)
    proposer.propose(ProposeInput(("a",), np.zeros(1, np.int32), table, i32(4), i32(1)))
    proposer.index.check_integrity(table)
